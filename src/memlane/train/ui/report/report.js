// Hovering over a plot shows the values at the nearest point. data-plot holds the numbers, px their x in the SVG.
for (const figure of document.querySelectorAll("figure[data-plot]")) {
  const plot = JSON.parse(figure.dataset.plot), svg = figure.querySelector("svg");
  const tip = figure.querySelector(".tip"), cross = figure.querySelector(".cross");
  const band = (name, i) => name in plot.bands ?
    "  (" + plot.bands[name].map(edge => format(edge[i])).join(" to ") + ")" : "";
  const format = v => v === null ? "-" : plot.percent ? (100 * v).toFixed(0) + "%" : String(v);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const at = (event.clientX - box.left) / scale;
    let i = plot.px.findIndex(p => p >= at);
    if (i < 0) i = plot.px.length - 1;
    if (i > 0 && at - plot.px[i - 1] < plot.px[i] - at) i--;
    cross.setAttribute("x1", plot.px[i]); cross.setAttribute("x2", plot.px[i]);
    cross.setAttribute("visibility", "visible");
    tip.textContent = [plot.x[i].toLocaleString("en") + " " + plot.unit,
      ...Object.entries(plot.lines).map(([name, values]) => name + "  " + format(values[i]) + band(name, i))].join("\n");
    tip.hidden = false;
    const left = box.left - figure.getBoundingClientRect().left + plot.px[i] * scale + 10;
    const room = figure.clientWidth - tip.offsetWidth - 8;
    tip.style.left = (left > room ? left - tip.offsetWidth - 20 : left) + "px";
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); });
}
