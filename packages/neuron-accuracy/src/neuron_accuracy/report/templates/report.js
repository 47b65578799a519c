// SPDX-License-Identifier: Apache-2.0
// Draws charts when they come into view, switches between light and dark, and opens what is folded for printing.
(() => {
  "use strict";
  const settings = { displayModeBar: false, responsive: true };
  const charts = [...document.querySelectorAll(".chart")];

  const draw = (chart, width) => {
    chart.dataset.drawn = width ? "print" : "screen";
    const { data, layout } = JSON.parse(document.getElementById(chart.dataset.figure).textContent);
    // In a narrow column the legend stands in a column too.
    if (layout.showlegend && (width ?? chart.clientWidth) < 480) layout.height += 20 * data.length;
    Plotly.react(chart, data, width ? { ...layout, width } : layout, settings);
  };
  // An entry may come late: the chart may be folded away, or drawn for paper, by then.
  const near = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (isIntersecting && target.clientWidth > 0 && !target.dataset.drawn) draw(target);
    }
  }, { rootMargin: "300px" });
  charts.forEach((chart) => near.observe(chart));

  const button = document.getElementById("theme");
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const say = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`);
  };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; say(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", say);
  button.hidden = false;
  say();

  // Paper is narrower than most windows; a heat map in a row of two gets half of it.
  const paper = (chart) => (chart.closest(".maps") ? 310 : 640);
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:is(.group, .rows):not([open])")];
    folded.forEach((details) => { details.open = true; });
    charts.forEach((chart) => draw(chart, paper(chart)));
  });
  // What is folded again cannot be measured: charts are drawn anew when they are next in view.
  addEventListener("afterprint", () => {
    folded.forEach((details) => { details.open = false; });
    charts.filter((chart) => chart.dataset.drawn === "print").forEach((chart) => {
      Plotly.purge(chart);
      delete chart.dataset.drawn;
      near.unobserve(chart);
      near.observe(chart);
    });
  });
})();
