// Look inside: attention maps, the next-token table and the figures of the lectures.

import {$, el, fail, number, post, table} from "/page/dom.js";

let figures = [], asked = 0; // asked: how often; an answer to an earlier text is not shown

export function start(choices) {
  figures = choices.figures;
  $("figure-name").replaceChildren(...figures.map(figure => el("option", {value: figure.name}, `${figure.name} [${figure.topics.join(", ")}]`)));
  $("figure-name").addEventListener("change", about);
  $("figure-name").value = "temperature";
  about();
  $("inside-form").addEventListener("submit", event => { event.preventDefault(); look(); });
  $("figure-form").addEventListener("submit", event => { event.preventDefault(); drawFigure(); });
}

const chosen = () => figures.find(figure => figure.name === $("figure-name").value);

function about() {
  const {shows, model, text} = chosen();
  const needs = [model === "needed" && "a run", text === "needed" && "a text"].filter(Boolean);
  $("figure-about").textContent = shows + (needs.length ? ` It needs ${needs.join(" and ")}.` : "");
}

async function look() {
  const name = $("inside-run").value, text = $("inside-text").value;
  if (!name) return fail($("attention-error"), new Error("there is no trained run yet; train one first"));
  const turn = ++asked;
  await Promise.all([showAttention(name, text, turn), showNext(name, text, turn)]);
}

async function showAttention(name, text, turn) {
  fail($("attention-error"), null);
  $("attention-status").textContent = "Reading the text …";
  try {
    const {page, unknown} = await post("/studio/attention", {name, text});
    if (turn !== asked) return;
    $("attention").src = page;
    $("attention").hidden = false;
    $("attention-empty").hidden = true;
    $("attention-status").textContent = unknown.length ? `Not in the vocabulary of this run, read as unknown: ${unknown.slice(0, 8).join(" ")}` : "";
  } catch (error) {
    if (turn !== asked) return;
    $("attention").hidden = true;
    $("attention-status").textContent = "";
    fail($("attention-error"), error);
  }
}

async function showNext(name, text, turn) {
  fail($("next-error"), null);
  try {
    const answer = await post("/studio/figure", {figure: "next-token", name, text});
    if (turn !== asked) return;
    $("next-table").replaceChildren(...answer.tables.map(shaded), numbers(answer.numbers));
  } catch (error) {
    if (turn !== asked) return;
    $("next-table").replaceChildren(el("p", {class: "empty"}, "No table for this run."));
    fail($("next-error"), error);
  }
}

function shaded({header, rows, shades}) {
  const result = table(header, rows, {class: "shaded"});
  rows.forEach((row, r) => row.forEach((_, c) => {
    const shade = shades?.[r]?.[c] ?? 0;
    if (shade > 0.01) result.tBodies[0].rows[r].cells[c].style.setProperty("--shade", `${Math.round(shade * 45)}%`);
  }));
  return result;
}

const numbers = values => el("dl", {class: "metrics"}, ...Object.entries(values).map(([key, value]) =>
  el("div", {}, el("dt", {}, key), el("dd", {}, number(value)))));

async function drawFigure() {
  const {name, model, text} = chosen();
  const body = {figure: name};
  if (model !== "no" && $("inside-run").value) body.name = $("inside-run").value;
  if (text !== "no" && $("inside-text").value) body.text = $("inside-text").value;
  // a figure of a run takes both or none, where both are possible
  if (model === "possible" && text === "possible" && !body.text) delete body.name;
  fail($("figure-error"), null);
  $("figure-status").textContent = "Drawing …";
  $("figure-button").disabled = true;
  try {
    const answer = await post("/studio/figure", body);
    const {title, caption, tables} = answer;
    const content = tables.length
      ? [el("h3", {}, title), el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": title}, ...tables.map(shaded)), el("p", {}, caption), numbers(answer.numbers)]
      : [el("img", {class: "figure", alt: `${title}. ${caption}`, src: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(answer.svg)}`})];
    $("figure").replaceChildren(...content,
      el("details", {}, el("summary", {}, "As text"), el("pre", {tabindex: "0", "aria-label": `${title} as text`}, answer.text)));
    $("figure-status").textContent = "";
  } catch (error) {
    $("figure-status").textContent = "";
    $("figure").replaceChildren();
    fail($("figure-error"), error);
  }
  $("figure-button").disabled = false;
}
