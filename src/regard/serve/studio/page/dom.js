// Helpers for elements, errors and requests. User text becomes text nodes, never HTML.

export const $ = id => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter(child => child != null).map(child =>
    typeof child === "number" ? String(child) : child));
  return node;
}

export const svg = (tag, attributes = {}, text) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
};

export function table(header, rows, attributes = {}) {
  const cell = (value, first) => value instanceof Node ? value
    : el(first ? "th" : "td", first ? {scope: "row"} : {}, show(value));
  return el("table", attributes,
    header.length ? el("thead", {}, el("tr", {}, ...header.map(h => el("th", {scope: "col"}, h)))) : null,
    el("tbody", {}, ...rows.map(row => el("tr", {}, ...row.map((v, n) => cell(v, n === 0))))));
}

// A value as it is written in a setting.
export function show(value) {
  if (value == null) return "–";
  if (Array.isArray(value)) return value.map(show).join(", ");
  if (typeof value === "object") return Object.entries(value).map(([k, v]) => `${k}=${show(v)}`).join(", ");
  return typeof value === "number" ? number(value) : String(value);
}

export function number(value) {
  if (value == null) return "–"; // JSON has no NaN and no infinity
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : size >= 0.001 ? String(+value.toPrecision(4)) : value.toExponential(2).replace(/\.?0+e/, "e");
}

// A token with visible spaces, tabs and line breaks.
export const visible = piece => piece.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";

export function showError(node, error) {
  node.textContent = error ? sentence(error.message || String(error)) : "";
  node.hidden = !error;
}

const sentence = text => {
  const trimmed = text.trim();
  return trimmed.charAt(0).toUpperCase() + trimmed.slice(1) + (/[.!?…]$/.test(trimmed) ? "" : ".");
};

// --- requests

let key = sessionStorage.getItem("regard-key");
let keyDialog = null; // a promise while the dialog is open

const isHeaderValue = text => /^[\x20-\x7e\xa0-\xff]*$/.test(text); // Latin-1; fetch throws an error for others

const headers = () => ({"Content-Type": "application/json", ...(key ? {Authorization: `Bearer ${key}`} : {})});

function askKey() {
  keyDialog ??= new Promise(resolve => {
    const dialog = $("key-dialog");
    showError($("key-error"), key ? new Error("the studio does not accept this API key") : null);
    dialog.addEventListener("close", () => {
      key = $("key").value;
      sessionStorage.setItem("regard-key", key);
      keyDialog = null;
      resolve();
    }, {once: true});
    dialog.showModal();
  });
  return keyDialog;
}

export async function request(path, body, signal) {
  while (key && !isHeaderValue(key)) await askKey();
  const options = body === undefined ? {headers: headers(), signal}
    : {method: "POST", headers: headers(), body: JSON.stringify(body), signal};
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer; is `regard studio` still running?");
  }
  if (response.status === 401) {
    await askKey();
    return request(path, body, signal);
  }
  if (!response.ok) {
    const answer = await response.json().catch(() => null);
    throw new Error(answer?.error?.message ?? `the server answered ${response.status}`);
  }
  return response;
}

export const get = async (path, signal) => (await request(path, undefined, signal)).json();
export const post = async (path, body, signal) => (await request(path, body, signal)).json();

// The continuation of a prompt as it is generated; with `chat`, the response to it as a user message.
export async function* complete({prompt, ...body}, chat, signal) {
  const [path, input] = chat ? ["/v1/chat/completions", {messages: [{role: "user", content: prompt}]}] : ["/v1/completions", {prompt}];
  const response = await request(path, {...body, ...input, stream: true}, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let partialLine = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (partialLine + value).split("\n");
    partialLine = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      signal?.throwIfAborted();
      yield (chat ? choice?.delta.content : choice?.text) ?? "";
    }
  }
}
