// The state that all panels share: the runs of the folder and the choices of the library.

import {$, el, get} from "/page/dom.js";

export const shared = {runs: [], training: {running: false}, choices: null};

export const taskName = run => run.task?.replaceAll("_", " ") ?? run.model;

const writesText = run => run.methods.some(method => ["generate", "translate", "chat"].includes(method));
export const generates = name => shared.runs.some(run => run.name === name && writesText(run));

export const translates = name => shared.runs.some(run => run.name === name && run.methods.includes("translate"));

const find = name => shared.runs.find(run => run.name === name);

// Whether a run predicts the next token of the text that it reads.
export const continues = name => find(name)?.methods.some(method => ["generate", "chat"].includes(method)) ?? false;

// The body of /predict for what is typed: numbers of a series, two texts on two lines, or a text.
export function predictionBody(name, text) {
  const {data_kind: kind, inputs = ["text"]} = find(name) ?? {};
  const body = {model: name, top: 5};
  if (kind === "series") return {model: name, series: text.trim().split(/[\s,;]+/).filter(Boolean).map(Number)};
  if (inputs.length < 2) return {...body, input: text};
  const lines = text.split("\n").map(line => line.trim()).filter(Boolean);
  if (lines.length !== inputs.length) throw new Error(`this run reads ${inputs.join(" and ")}; write each on a line of its own, in the panel Generate`);
  return {...body, input: [lines]};
}

// What to type for a run that predicts.
export function predictionHint(name) {
  const {data_kind: kind, inputs = ["text"]} = find(name) ?? {};
  if (["images", "captions"].includes(kind)) return "This run reads images, which the page does not take; use the command line: regard predict RUN FILE.";
  if (kind === "series") return "This run forecasts a series of numbers. Type its last values, separated by spaces, and press Predict.";
  if (inputs.length > 1) return `This run predicts from ${inputs.join(" and ")}. Write each on a line of its own and press Predict.`;
  return "This run predicts; it does not generate a text. Type an input and press Predict.";
}

export async function refreshRuns() {
  const answer = await get("/studio/runs");
  shared.runs = answer.runs;
  shared.training = answer.training;
  $("folder").textContent = answer.folder;
  for (const select of document.querySelectorAll("select[data-runs]")) fillRuns(select);
  document.dispatchEvent(new CustomEvent("runs"));
}

function fillRuns(select) {
  const ready = shared.runs.filter(run => run.ready);
  const names = ready.map(run => run.name);
  const selected = select.value;
  if (names.join("/") === [...select.options].map(option => option.value).join("/")) return;
  select.replaceChildren(...(ready.length
    ? ready.map(run => el("option", {value: run.name}, `${run.name} (${taskName(run)})`))
    : [el("option", {value: ""}, "no trained run yet")]));
  const second = select.id === "compare-b" ? names[1] : names[0];
  select.value = select.dataset.chosen && names.includes(selected) ? selected : second ?? names[0] ?? "";
}

document.addEventListener("change", ({target}) => { target.dataset.chosen = "true"; }); // by the user

export async function loadChoices() {
  shared.choices = await get("/studio/choices");
  return shared.choices;
}
