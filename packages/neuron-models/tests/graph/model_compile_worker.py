# SPDX-License-Identifier: Apache-2.0
"""Compiles ahead of time, serves from the result, or captures a large model; prints what it counted as JSON."""

import json
import multiprocessing
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, LlamaConfig

from neuron_core import ops
from neuron_core.devices.cpu import CpuDevice
from neuron_core.graphs.aot import compile_ahead
from neuron_core.graphs.buckets import BucketPlan
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.compilers import FxCompiler, InductorCompiler
from neuron_core.graphs.model_programs import ModelPrograms
from neuron_models import build_model, load_weights
from neuron_models.aot import ModelCompile, ModelWorker
from neuron_parallel import ParallelGroups, ParallelPlan

# The published configuration of Llama 3.1 70B.
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}


def plan(ranks):
    return BucketPlan.from_limits(
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        block_size=16,
        decode_buckets=(2,),
        token_multiple=ranks,
    )


def compile_model(folder, cache, ranks):
    job = ModelCompile(
        config=AutoConfig.from_pretrained(folder),
        dtype=torch.bfloat16,
        plan=plan(ranks),
        parallel=ParallelPlan(ranks),
        target="cpu",
        cache_dir=cache,
        num_blocks=17,
        cpu_threads=1,
    )
    results = compile_ahead(job.worker(), job.tasks(), jobs=2, logs=cache / "logs")
    assert not any(result.error for result in results), [result.error for result in results]
    graphs = {digest for result in results for digest in result.outcome.graphs}
    return {"compiled": sum(result.outcome.compiled for result in results), "distinct": len(graphs)}


def serve_rank(folder, cache, rank, ranks, queue):
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{cache}/rendezvous", rank=rank, world_size=ranks)
    groups = ParallelGroups.create(ParallelPlan(ranks))
    ops.load_kernels(cache)
    config = AutoConfig.from_pretrained(folder)
    model = build_model(config, dtype=torch.bfloat16, groups=groups, block_size=16)
    load_weights(model, folder, groups.tp, groups.tp.rank())
    device = CpuDevice(cache_dir=cache)
    device.prepare(model)
    store = CompileCache(cache)
    compiler = InductorCompiler(store.toolchain_dir, 1)
    builder = GraphBuilder(device, compiler, store, require_compiled=True)
    programs = ModelPrograms(model, plan(ranks), 33)  # another number of blocks than was compiled for
    pending = [
        builder.submit(programs.program(*wanted), programs.specs(wanted[0]), bucket=wanted[0].name)
        for wanted in programs.wanted()
    ]
    for waiting in pending:
        waiting.result()
    stats = builder.stats
    queue.put({"captured": stats.captured, "compiled": stats.compiled, "loaded": stats.loaded})


def serve(folder, cache, ranks):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=serve_rank, args=(folder, cache, r, ranks, queue)) for r in range(ranks)
    ]
    for process in processes:
        process.start()
    counts = [queue.get(timeout=240) for _ in processes]
    for process in processes:
        process.join()
    return counts


class CaptureWorker(ModelWorker):
    """Captures alone: which compiler would follow makes no difference to what capture needs."""

    def _compiler(self):
        return FxCompiler()


def capture_70b(cache):
    job = ModelCompile(
        config=LlamaConfig(**LLAMA_70B, architectures=["LlamaForCausalLM"], tie_word_embeddings=False),
        dtype=torch.bfloat16,
        plan=BucketPlan.from_limits(
            max_model_len=131072,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            block_size=16,
            token_multiple=8,
        ),
        parallel=ParallelPlan(8),
        target="trn2",
        cache_dir=cache,
        num_blocks=8193,
        cpu_threads=1,
    )
    worker = CaptureWorker(job)
    graphs = 0
    for bucket, variant in worker.programs.wanted():
        program = worker.programs.program(bucket, variant)
        graphs += len(worker.builder.capture_program(program, worker.programs.specs(bucket), bucket.name))
    return {
        "parameters": sum(parameter.numel() for parameter in worker.programs.model.parameters()),
        "graphs": graphs,
        "buckets": len(job.plan.all()) - 1,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    action, *arguments = sys.argv[1:]
    if action == "capture70b":
        print(json.dumps(capture_70b(Path(arguments[0]))))
    else:
        folder, cache, ranks = Path(arguments[0]), Path(arguments[1]), int(arguments[2])
        print(json.dumps((compile_model if action == "compile" else serve)(folder, cache, ranks)))
