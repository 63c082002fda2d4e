// The loss over the steps as an SVG: training as a solid line, validation as a dashed line with dots.

import {el, number, svg} from "/page/dom.js";

const MARGIN = {left: 46, right: 26, top: 10, bottom: 34};

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(n => n * power).find(n => n >= raw);
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) values.push(+value.toPrecision(6));
  return values;
}

// `training` and `validation` are lists of [step, loss].
export function drawChart(figure, training, validation) {
  const all = [...training, ...validation];
  if (!all.length) {
    figure.replaceChildren();
    return;
  }
  const width = Math.max(280, figure.clientWidth || 480), height = Math.round(Math.min(300, width * 0.55));
  const right = Math.max(...all.map(p => p[0]), 1);
  const values = all.map(p => p[1]);
  const low = Math.min(...values), high = Math.max(...values), pad = (high - low) * 0.06 || 0.1;
  const x = step => MARGIN.left + step / right * (width - MARGIN.left - MARGIN.right);
  const y = value => MARGIN.top + (high + pad - value) / (high - low + 2 * pad) * (height - MARGIN.top - MARGIN.bottom);
  const last = list => list.length ? number(list.at(-1)[1]) : "none";
  const chart = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Loss over ${number(right)} steps. Training: ${last(training)}. Validation: ${last(validation)}.`});
  for (const tick of ticks(low - pad, high + pad, 5)) {
    chart.append(svg("line", {x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick), class: "grid"}));
    chart.append(svg("text", {x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end"}, number(tick)));
  }
  for (const tick of ticks(0, right, Math.min(6, width / 90)))
    chart.append(svg("text", {x: x(tick), y: height - MARGIN.bottom + 16, "text-anchor": "middle"}, number(tick)));
  chart.append(svg("text", {x: (MARGIN.left + width - MARGIN.right) / 2, y: height - 3, "text-anchor": "middle"}, "step"));
  const path = points => points.map((p, n) => `${n ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
  chart.append(svg("path", {d: path(training), class: "train-line"}));
  if (validation.length) {
    chart.append(svg("path", {d: path(validation), class: "validation-line"}));
    for (const [step, value] of validation) chart.append(svg("circle", {cx: x(step), cy: y(value), r: 3.2, class: "validation-dot"}));
  }
  const legend = el("figcaption", {}, el("span", {class: "key train-key"}, "training loss"),
    validation.length ? el("span", {class: "key validation-key"}, "validation loss") : null);
  figure.replaceChildren(chart, legend);
}
