// Presets: the diagrams of two models, and the settings in which they differ.

import {$, el, get, number, show, showError, table} from "/page/dom.js";
import {shared} from "/page/state.js";

let drawn = false, latest = 0; // latest: the number of the last request; answers to earlier ones are not shown

export function start(choices) {
  const fill = () => {
    for (const [id, first] of [["preset-a", "gpt2"], ["preset-b", "llama"]]) {
      const old = $(id).value || first;
      const group = (label, names, prefix) => names.length
        ? el("optgroup", {label}, ...names.map(name => el("option", {value: prefix + name}, name))) : "";
      $(id).replaceChildren(group("runs", shared.runs.filter(run => run.task).map(run => run.name), "run:"), group("presets", choices.presets, ""));
      $(id).value = old;
      if (!$(id).value) $(id).value = first; // the run was deleted
    }
  };
  fill();
  document.addEventListener("runs", fill);
  for (const id of ["preset-a", "preset-b"]) $(id).addEventListener("change", draw);
  $("presets-form").addEventListener("submit", event => { event.preventDefault(); draw(); });
}

const displayName = name => name.replace(/^run:/, "");

export function onShow() {
  if (!drawn) draw();
  drawn = true;
}

async function draw() {
  const [first, second] = [$("preset-a").value, $("preset-b").value], request = ++latest;
  showError($("presets-error"), null);
  try {
    const query = new URLSearchParams({first, second});
    const [a, b, diff] = await Promise.all([structure(first), structure(second), get(`/studio/diff?${query}`)]);
    if (request !== latest) return;
    drawStructure($("structure-a"), a);
    drawStructure($("structure-b"), b);
    drawDifferences(diff);
  } catch (error) {
    if (request === latest) showError($("presets-error"), error);
  }
}

const structure = name => get(`/studio/structure?${new URLSearchParams({name})}`);

function drawStructure(card, model) {
  const parts = Object.entries(model.parts);
  const size = model.parameters ? `${number(model.parameters)} parameters` : "fitted without gradients";
  card.replaceChildren(el("h2", {}, displayName(model.name)),
    el("p", {class: "hint"}, `${model.kind}, ${model.family}, ${size}`),
    el("pre", {class: "diagram", tabindex: "0", "aria-label": `Diagram of ${displayName(model.name)}`}, model.diagram),
    ...(model.published ? [el("p", {class: "hint"}, `${model.published.source}: ${number(model.published.count)} parameters`)] : []),
    parts.length ? el("details", {}, el("summary", {}, "Parameters by part"),
      table(["part", "parameters", "share"], parts.map(([part, count]) => [part, number(count), `${(100 * count / model.parameters).toFixed(1)} %`]))) : null,
    el("details", {}, el("summary", {}, "All settings"), table(["setting", "value"], Object.entries(model.settings).map(([key, value]) => [key, show(value)]))));
}

function drawDifferences({names, groups}) {
  const bodies = Object.entries(groups).filter(([, rows]) => Object.keys(rows).length);
  if (!bodies.length) {
    $("differences").replaceChildren(el("p", {class: "empty"}, `${displayName(names[0])} and ${displayName(names[1])} are the same model.`));
    return;
  }
  $("differences").replaceChildren(el("table", {},
    el("thead", {}, el("tr", {}, el("th", {scope: "col"}, "setting"), ...names.map(name => el("th", {scope: "col"}, displayName(name))))),
    ...bodies.map(([title, rows]) => el("tbody", {}, el("tr", {class: "group"}, el("th", {scope: "rowgroup", colspan: 3}, title)),
      ...Object.entries(rows).map(([key, values]) => el("tr", {}, el("th", {scope: "row"}, key), ...values.map(value => el("td", {}, show(value)))))))));
}
