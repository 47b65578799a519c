# SPDX-License-Identifier: Apache-2.0
"""Run by the push tests in processes of its own: ``remote_worker.py JOB`` pushes, and says how far it is.

JOB is JSON: url, options, key (PEM file), entries (folders), requests, hold (name after which it waits for ever).
"""

import json
import sys
import time
from pathlib import Path

from neuron_core.graphs.remote import RemoteStore, Signer, TrustPolicy


def main(job):
    def on_progress(done, total, name):
        print(done, total, name, flush=True)
        if name == job["hold"]:
            time.sleep(600)

    signer = Signer.from_pem(Path(job["key"]))
    store = RemoteStore.open(job["url"], trust=TrustPolicy(), timeout_s=60.0, storage_options=job["options"])
    print("start", flush=True)
    report = store.push(map(Path, job["entries"]), job["requests"], signer=signer, on_progress=on_progress)
    print("pushed", report.pushed, report.already_there, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
