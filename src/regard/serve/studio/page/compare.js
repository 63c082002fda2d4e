// Compare: two runs continue the same prompt with the same seed.

import {$, complete, el, fail, get, number, post, table, visible} from "/page/dom.js";
import {generates, predictionBody} from "/page/state.js";
import {firstPrediction, percent} from "/page/generate.js";

let running = null;

export function start() {
  $("compare-form").addEventListener("submit", compare);
}

async function compare(event) {
  event.preventDefault();
  running?.abort();
  running = new AbortController();
  await Promise.all(["a", "b"].map(side => show(side, running.signal)));
}

async function show(side, signal) {
  const run = $(`compare-${side}`).value, card = document.querySelector(`#compare-out [data-side=${side}]`);
  const output = card.querySelector("output"), error = card.querySelector(".error"), prompt = $("compare-prompt").value;
  card.querySelector("h2").textContent = run || "No run";
  fail(error, run ? null : new Error("there is no trained run yet; train one first"));
  if (!run) return;
  output.classList.remove("empty");
  output.setAttribute("aria-busy", "true");
  output.replaceChildren();
  card.querySelector(".numbers").replaceChildren();
  card.querySelector(".next").replaceChildren();
  const body = {model: run, seed: +$("compare-seed").value || 0,
    sampler: [`temperature=${$("compare-temperature").value || 1}`, `top_p=${$("compare-top-p").value || 1}`]};
  try {
    if (generates(run)) {
      output.append(el("span", {class: "prompt"}, prompt));
      for await (const text of complete({...body, prompt, max_tokens: +$("compare-tokens").value || 1}, signal)) output.append(text);
      const {tokens, stages} = await post("/studio/distribution", {...body, text: prompt, top: 8}, signal);
      card.querySelector(".next").replaceChildren(el("h3", {}, "Next token after the prompt"), table(["token", "model", "after the samplers"],
        tokens.map((token, n) => [visible(token.piece), percent(stages[0].probabilities[n]), percent(stages.at(-1).probabilities[n])])));
    } else {
      const answer = await post("/predict", predictionBody(run, prompt), signal);
      output.append(firstPrediction(answer));
    }
    const progress = await get(`/studio/runs/${encodeURIComponent(run)}`);
    card.querySelector(".numbers").replaceChildren(el("h3", {}, "Validation and size"), table([], Object.entries({...progress.metrics, steps: progress.step, ...progress.model})
      .map(([key, value]) => [key.replaceAll("_", " "), typeof value === "number" ? number(value) : value])));
  } catch (problem) {
    if (problem.name !== "AbortError") fail(error, problem);
  }
  output.removeAttribute("aria-busy");
}
