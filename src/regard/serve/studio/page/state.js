// What all panels share: the runs of the folder and the choices of the library.

import {$, el, get} from "/page/dom.js";

export const shared = {runs: [], training: {running: false}, choices: null};

export const taskName = run => run.task?.replaceAll("_", " ") ?? run.model;

const writes = run => run.methods.some(method => ["generate", "translate", "chat"].includes(method));
export const generates = name => shared.runs.some(run => run.name === name && writes(run));

export const translates = name => shared.runs.some(run => run.name === name && run.methods.includes("translate"));

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
  const old = select.value;
  if (names.join("/") === [...select.options].map(option => option.value).join("/")) return;
  select.replaceChildren(...(ready.length
    ? ready.map(run => el("option", {value: run.name}, `${run.name} (${taskName(run)})`))
    : [el("option", {value: ""}, "no trained run yet")]));
  const second = select.id === "compare-b" ? names[1] : names[0];
  select.value = select.dataset.chosen && names.includes(old) ? old : second ?? names[0] ?? "";
}

document.addEventListener("change", ({target}) => { target.dataset.chosen = "true"; }); // by the user

export async function loadChoices() {
  shared.choices = await get("/studio/choices");
  return shared.choices;
}
