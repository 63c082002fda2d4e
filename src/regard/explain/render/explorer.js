(key => {
"use strict";
const LIGHT = [[255,255,255],[133,180,222],[33,96,165],[8,36,84]];
const DARK = [[20,23,28],[84,48,122],[214,84,88],[255,236,160]];
const SIGNED = {light: [[5,48,97],[67,147,195],[255,255,255],[214,96,77],[103,0,31]],
                dark: [[90,170,255],[40,80,140],[20,23,28],[160,60,50],[255,140,110]]};
const SIDE = 620, SHOWN_TOKENS = 2000, ARC_TOKENS = 80, TOP = 12;

const el = (tag, attributes, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {}))
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(name, value === true ? "" : value);
  node.append(...children);  // strings become text nodes, never markup
  return node;
};
const svg = (tag, attributes, text) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
};
const bytes = text => Uint8Array.from(atob(text), character => character.charCodeAt(0));
const inflate = async text => {
  const stream = new Blob([bytes(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
};
const blend = (colours, fraction) => {
  const place = Math.min(Math.max(fraction, 0), 1) * (colours.length - 1);
  const first = Math.min(Math.floor(place), colours.length - 2), rest = place - first;
  return [0, 1, 2].map(c => colours[first][c] * (1 - rest) + colours[first + 1][c] * rest);
};
const format = value => value.toFixed(4);
const quote = token => "\u201c" + token + "\u201d";
const truncate = (token, length) => token.length > length ? token.slice(0, length - 1) + "\u2026" : token;

function start(host) {
  const data = JSON.parse(host.querySelector(".regard-meta").textContent);
  const root = host.attachShadow({mode: "open"});
  root.append(el("style", {}, host.querySelector(".regard-style").textContent));
  root.addEventListener("keydown", event => {  // the notebook does not receive the keys used here
    const pressed = event.target.localName === "button" && ["Enter", " "].includes(event.key);
    if (event.defaultPrevented || pressed) event.stopPropagation();
  });
  const cache = new Map();
  const selected = {map: 0, head: 0, row: 0, column: 0, view: "map", rows: null, columns: null};
  let values = null, painted = null, theme = "light";

  const map = () => data.maps[selected.map];
  const labels = axis => data.labels[map()[axis]];
  const shownLabels = axis => {  // the labels of rows or columns; if pooled, the first of each group
    const m = map(), all = labels(axis), size = m.shape[axis === "rows" ? 1 : 2];
    if (!m.pooled) return all;
    return Array.from({length: size}, (_, n) => all[Math.floor(n * all.length / size)]);
  };
  const place = (axis, n) => {  // the index of the token; if pooled, the first and the last of the group
    const m = map(), side = axis === "rows" ? 0 : 1, size = m.shape[side + 1], full = m.full[side];
    const first = Math.floor(n * full / size), last = Math.ceil((n + 1) * full / size) - 1;
    return first === last ? `${first}` : `${first}\u2013${last}`;
  };
  const load = async (m, h) => {
    const id = m + "." + h;
    if (!cache.has(id)) {
      const [, rows, columns] = data.maps[m].shape, size = rows * columns;
      const raw = await inflate(host.querySelector(`[data-weights="${id}"]`).textContent);
      const {max, signed} = data.maps[m], out = new Float32Array(size);
      for (let n = 0; n < size; n++) {
        const integer = raw[n] * 256 + raw[size + n];
        out[n] = signed ? (integer - 32768) / 32767 * max : integer / 65535 * max;
      }
      if (cache.size > 12) cache.delete(cache.keys().next().value);
      cache.set(id, out);
    }
    return cache.get(id);
  };
  const value = (row, column) => values ? values[row * map().shape[2] + column] : 0;
  const colour = (v, m) => {
    if (m.signed) return blend(SIGNED[theme], (v / m.top + 1) / 2);
    return blend(theme === "dark" ? DARK : LIGHT, Math.sqrt(Math.max(v, 0) / m.top));
  };
  const css = rgb => `rgb(${rgb.map(Math.round).join(",")})`;
  const luminance = rgb => rgb.map(part => part / 255)  // relative luminance (WCAG 2)
    .map(part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4)
    .reduce((sum, part, n) => sum + [.2126, .7152, .0722][n] * part, 0);
  const textColour = rgb => luminance(rgb) > .179 ? "#000" : "#fff";  // the colour with the larger contrast

  // --- the parts of the page
  const readout = el("div", {class: "readout", role: "status", "aria-live": "polite"});
  const tip = el("div", {class: "tip", hidden: true});
  // "application": a screen reader passes the arrow keys on; `readout` says what they choose
  const keyboardAttributes = {tabindex: "0", role: "application"};
  const canvas = el("canvas", {class: "map", ...keyboardAttributes});
  const overlay = el("canvas", {class: "image", hidden: true, ...keyboardAttributes});
  const arcs = svg("svg", {role: "img"});
  const note = el("p", {});
  const heading = el("h2", {});
  const side = el("div", {class: "side"});
  const tokens = el("div", {class: "tokens", role: "group"});
  const overview = el("div", {class: "overview"});
  const views = {map: "Map", arcs: "Arcs", image: "Image"};
  const buttons = Object.fromEntries(Object.entries(views).map(([name, text]) => [name,
    el("button", {type: "button", onclick: () => { selected.view = name; paint(); }}, text)]));
  const bar = el("div", {class: "bar"}, ...Object.values(buttons),
    el("button", {type: "button", "aria-label": "zoom in", onclick: () => zoom(.5)}, "+"),
    el("button", {type: "button", "aria-label": "zoom out", onclick: () => zoom(2)}, "\u2212"));
  root.append(overview, bar, heading, note,
    el("div", {class: "main"}, el("div", {class: "view"}, canvas, overlay, arcs, tip), side),
    readout, tokens,
    el("p", {}, "Keys: arrows move in the overview, the map and the image, + and \u2212 zoom, " +
      "Escape shows all."));

  // --- overview: layers \u00d7 heads
  const cells = [];
  const maxHeads = Math.max(...data.maps.map(m => m.headings.length));
  const table = el("table", {"aria-label": "layers and heads"});
  if (maxHeads > 1) table.append(el("tr", {}, el("td", {}),
    ...Array.from({length: maxHeads}, (_, h) => el("th", {scope: "col"},
      data.maps.find(m => m.headings.length > h).headings[h].replace(/^head /, "")
        .replaceAll("_", " ")))));
  data.maps.forEach((m, index) => {
    const line = el("tr", {}, el("th", {scope: "row"}, m.name));
    const thumbs = bytes(m.thumbs), [, height, width] = m.thumbShape;
    m.headings.forEach((name, h) => {
      const small = el("canvas", {width, height});
      const button = el("button", {type: "button", tabindex: "-1", title: m.name + ", " + name,
        "aria-label": `${m.name}, ${name}${m.entropy.length ? ", entropy " + m.entropy[h].toFixed(2) : ""}`,
        onclick: () => choose(index, h)}, small);
      button.addEventListener("keydown", event => {
        const step = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0],
                      ArrowDown: [1, 0]}[event.key];
        if (!step) return;
        event.preventDefault();
        const to = Math.min(Math.max(index + step[0], 0), data.maps.length - 1);
        const head = Math.min(Math.max(h + step[1], 0), data.maps[to].headings.length - 1);
        choose(to, head).then(() => cells[to][head].button.focus());
      });
      (cells[index] = cells[index] || []).push({button, small, thumbs, height, width});
      line.append(el("td", {}, button));
    });
    table.append(line);
  });
  if (data.maps.length > 1 || maxHeads > 1) overview.append(table); else overview.hidden = true;
  const paintThumbs = () => data.maps.forEach((m, n) => cells[n].forEach((cell, h) => {
    const {small, thumbs, height, width} = cell;
    const context = small.getContext("2d"), image = context.createImageData(width, height);
    for (let p = 0; p < height * width; p++) {
      const step = thumbs[h * height * width + p] / 255;
      const rgb = m.signed ? blend(SIGNED[theme], step) : blend(theme === "dark" ? DARK : LIGHT, step);
      image.data.set([...rgb, 255], 4 * p);
    }
    context.putImageData(image, 0, 0);
  }));

  // --- selecting a map and a head
  async function choose(m, h) {
    const other = map();
    selected.map = m; selected.head = h;
    if (map() !== other) { selected.rows = selected.columns = null; }
    const [, rows, columns] = map().shape;
    selected.row = Math.min(selected.row, rows - 1);
    selected.column = Math.min(selected.column, columns - 1);
    cells.forEach((line, n) => line.forEach((cell, k) => {
      const chosen = n === m && k === h;
      cell.button.setAttribute("aria-pressed", chosen);
      cell.button.tabIndex = chosen ? 0 : -1;
    }));
    const weights = await load(m, h);
    if (selected.map !== m || selected.head !== h) return;  // another head was chosen meanwhile
    values = weights;
    if (readout.textContent) readout.textContent = describe(selected.row, selected.column);
    paint();
  }
  function zoom(factor) {
    const [, rows, columns] = map().shape;
    const narrow = (range, size, center) => {
      const [low, high] = range || [0, size], half = Math.max(4, (high - low) * factor / 2);
      if (2 * half >= size) return null;
      const first = Math.min(Math.max(0, Math.round(center - half)), size - Math.ceil(2 * half));
      return [first, first + Math.ceil(2 * half)];
    };
    selected.rows = narrow(selected.rows, rows, selected.row);
    selected.columns = narrow(selected.columns, columns, selected.column);
    paint();
  }
  const named = (axis, n) => `${quote(shownLabels(axis)[n])} (${place(axis, n)})`;
  const describe = (row, column) => named("rows", row) + (map().kind === "states"
    ? `, unit ${shownLabels("columns")[column]}: ` : ` \u2192 ${named("columns", column)}: `) +
    (map().pooled ? "largest " : "") + format(value(row, column));

  const space = () => host.clientWidth - 16;  // without the padding

  // --- one head large
  function geometry() {
    const [, rows, columns] = map().shape;
    const [r0, r1] = selected.rows || [0, rows], [c0, c1] = selected.columns || [0, columns];
    const left = Math.min(150, 14 + 7 * Math.max(...shownLabels("rows").slice(r0, r1)
      .map(token => Math.min(token.length, 18)), 1));
    const top = Math.min(130, 14 + 7 * Math.max(...shownLabels("columns").slice(c0, c1)
      .map(token => Math.min(token.length, 16)), 1));
    const room = Math.max(160, Math.min(SIDE, space() - left - 12));  // fits a narrow page
    const down = Math.min(26, SIDE / (r1 - r0)), across = Math.min(26, room / (c1 - c0));
    const square = map().kind !== "states", cellWidth = square ? Math.min(down, across) : across;
    const cellHeight = square ? cellWidth : down;
    return {r0, r1, c0, c1, cellWidth, cellHeight, left, top,
            width: cellWidth * (c1 - c0), height: cellHeight * (r1 - r0)};
  }
  function paintMap() {
    const g = geometry(), m = map(), ratio = Math.min(window.devicePixelRatio || 1, 2);
    const width = Math.ceil(g.left + g.width + 10), height = Math.ceil(g.top + g.height + 10);
    canvas.width = width * ratio; canvas.height = height * ratio;
    canvas.style.width = width + "px"; canvas.style.height = height + "px";
    canvas.setAttribute("aria-label", `${m.name}, ${m.headings[selected.head]}: ${g.r1 - g.r0} rows, ` +
      `${g.c1 - g.c0} columns; use the arrow keys to read the weights`);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const down = Math.min(g.r1 - g.r0, SIDE), across = Math.min(g.c1 - g.c0, SIDE);
    const small = document.createElement("canvas");
    small.width = across; small.height = down;
    const inner = small.getContext("2d"), image = inner.createImageData(across, down);
    const stepR = (g.r1 - g.r0) / down, stepC = (g.c1 - g.c0) / across;
    for (let y = 0; y < down; y++) for (let x = 0; x < across; x++) {
      let best = 0;  // the value of the largest magnitude under this pixel
      for (let r = Math.floor(g.r0 + y * stepR); r < g.r0 + (y + 1) * stepR && r < g.r1; r++)
        for (let c = Math.floor(g.c0 + x * stepC); c < g.c0 + (x + 1) * stepC && c < g.c1; c++)
          if (Math.abs(value(r, c)) > Math.abs(best)) best = value(r, c);
      image.data.set([...colour(best, m), 255], 4 * (y * across + x));
    }
    inner.putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, g.left, g.top, g.width, g.height);
    const style = getComputedStyle(host);
    context.strokeStyle = style.getPropertyValue("--line");
    context.strokeRect(g.left - .5, g.top - .5, g.width + 1, g.height + 1);
    context.fillStyle = style.getPropertyValue("--text");
    context.font = "12px system-ui, sans-serif"; context.textBaseline = "middle";
    const stride = size => Math.max(1, Math.ceil(11 / size));
    context.textAlign = "right";
    for (let r = g.r0; r < g.r1; r += stride(g.cellHeight))
      context.fillText(truncate(shownLabels("rows")[r], 18), g.left - 5,
        g.top + (r - g.r0 + .5) * g.cellHeight, g.left - 8);
    context.textAlign = "left";
    for (let c = g.c0; c < g.c1; c += stride(g.cellWidth)) {
      context.save();
      context.translate(g.left + (c - g.c0 + .5) * g.cellWidth, g.top - 5); context.rotate(-Math.PI / 2);
      context.fillText(truncate(shownLabels("columns")[c], 16), 0, 0, g.top - 8);
      context.restore();
    }
    context.strokeStyle = style.getPropertyValue("--mark"); context.lineWidth = 2;
    const {row, column} = selected;
    if (row >= g.r0 && row < g.r1 && column >= g.c0 && column < g.c1)
      context.strokeRect(g.left + (column - g.c0) * g.cellWidth, g.top + (row - g.r0) * g.cellHeight,
        Math.max(g.cellWidth, 3), Math.max(g.cellHeight, 3));
    painted = g;
  }
  const cellAt = event => {
    const box = canvas.getBoundingClientRect(), g = painted;
    const x = (event.clientX - box.left - g.left) / g.cellWidth;
    const y = (event.clientY - box.top - g.top) / g.cellHeight;
    if (x < 0 || y < 0 || x >= g.c1 - g.c0 || y >= g.r1 - g.r0) return null;
    let best = [Math.floor(y) + g.r0, Math.floor(x) + g.c0];
    if (g.cellWidth < 1 || g.cellHeight < 1) {  // the largest of the cells under the pointer
      const [r, c] = best;
      for (let i = r; i < Math.min(r + Math.ceil(1 / g.cellHeight), g.r1); i++)
        for (let j = c; j < Math.min(c + Math.ceil(1 / g.cellWidth), g.c1); j++)
          if (Math.abs(value(i, j)) > Math.abs(value(...best))) best = [i, j];
    }
    return best;
  };
  const show = (text, event) => {
    tip.hidden = text === null;
    if (text === null) return;
    const box = tip.parentNode.getBoundingClientRect();
    tip.textContent = text;
    tip.style.left = Math.max(0, Math.min(event.clientX - box.left + 12,
      Math.max(box.width, 300) - tip.offsetWidth)) + "px";
    tip.style.top = event.clientY - box.top + 14 + "px";
  };
  canvas.addEventListener("mousemove", event => {
    const cell = cellAt(event);
    show(cell && describe(...cell), event);
  });
  canvas.addEventListener("mouseleave", () => show(null));
  canvas.addEventListener("click", event => {
    const cell = cellAt(event);
    if (cell) { [selected.row, selected.column] = cell; select(); }
  });
  canvas.addEventListener("keydown", event => {
    const [, rows, columns] = map().shape;
    if (event.key === "+" || event.key === "=") zoom(.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "Escape") { selected.rows = selected.columns = null; paint(); }
    else if (event.key === "ArrowLeft") selected.column = Math.max(0, selected.column - 1);
    else if (event.key === "ArrowRight") selected.column = Math.min(columns - 1, selected.column + 1);
    else if (event.key === "ArrowUp") selected.row = Math.max(0, selected.row - 1);
    else if (event.key === "ArrowDown") selected.row = Math.min(rows - 1, selected.row + 1);
    else return;
    event.preventDefault();
    select();
  });
  function select() {
    readout.textContent = describe(selected.row, selected.column);
    paint();
  }

  // --- tokens, the largest weights of a row, arcs, image
  function paintTokens() {
    const m = map();
    tokens.replaceChildren();
    tokens.hidden = m.kind === "states" || (Boolean(m.image) && m.kind === "self");
    if (tokens.hidden) return;
    const both = m.kind === "cross" || m.rows !== m.columns;
    const line = (axis, pick) => shownLabels(axis).slice(0, SHOWN_TOKENS).map((token, n) => {
      const target = axis === "columns";
      const button = el("button", {type: "button", tabindex: n ? "-1" : "0"}, token);
      if (target) {
        const rgb = colour(value(selected.row, n), m);
        button.style.background = css(rgb); button.style.color = textColour(rgb);
        button.title = format(value(selected.row, n));
      }
      if (pick) {
        button.setAttribute("aria-pressed", n === selected.row);
        button.addEventListener("click", () => {
          selected.row = n;
          select();
          tokens.querySelector('[aria-pressed="true"]').focus();  // select has replaced the button
        });
        // mouseenter would also be sent to a new button under a pointer at rest
        button.addEventListener("mousemove", () => {
          if (selected.row !== n) { selected.row = n; hover(n); }
        });
      }
      button.addEventListener("keydown", event => {
        const to = {ArrowLeft: button.previousSibling, ArrowRight: button.nextSibling}[event.key];
        if (to && to.focus) { event.preventDefault(); to.focus(); if (pick) to.click(); }
      });
      return button;
    });
    tokens.setAttribute("aria-label", "tokens, shaded by the weight of the chosen row");
    if (both) tokens.append(el("div", {}, ...line("rows", true)));
    if (!m.image) tokens.append(el("div", {}, ...line("columns", !both)));
    if (shownLabels("columns").length > SHOWN_TOKENS)
      tokens.append(el("p", {}, `the first ${SHOWN_TOKENS} of ${shownLabels("columns").length} tokens`));
  }
  function hover(row) {  // shade without building the tokens again, so that the pointer stays on one
    const lines = [...tokens.querySelectorAll("div")], m = map();
    [...lines[0].children].forEach((button, n) => button.setAttribute("aria-pressed", n === row));
    if (!m.image) [...lines[lines.length - 1].children].forEach((button, n) => {
      const rgb = colour(value(row, n), m);
      button.style.background = css(rgb); button.style.color = textColour(rgb);
      button.title = format(value(row, n));
    });
    paintSide(); paintView();
  }
  function paintSide() {
    const m = map(), [, , columns] = m.shape;
    const order = Array.from({length: columns}, (_, c) => c)
      .sort((a, b) => Math.abs(value(selected.row, b)) - Math.abs(value(selected.row, a))).slice(0, TOP);
    const what = m.kind === "states" ? "largest units at" : "largest weights of";
    side.replaceChildren(el("table", {},
      el("caption", {}, `${what} ${named("rows", selected.row)}`),
      ...order.map(c => el("tr", {}, el("td", {}, truncate(shownLabels("columns")[c], 40)),
        el("td", {}, m.kind === "states" ? "" : `(${place("columns", c)})`),
        el("td", {}, format(value(selected.row, c)))))));
  }
  function paintArcs() {
    const m = map(), [, rows, columns] = m.shape, rowHeight = 18;
    const range = (size, center) => {
      const first = Math.max(0, Math.min(center - ARC_TOKENS / 2, size - ARC_TOKENS));
      return [first, Math.min(size, first + ARC_TOKENS)];
    };
    const [r0, r1] = range(rows, selected.row);
    const [c0, c1] = range(columns, m.kind === "cross" ? 0 : selected.row);
    const height = rowHeight * Math.max(r1 - r0, c1 - c0) + 8;
    const width = Math.min(560, space()), [from, to] = [.34 * width, .66 * width];
    const longest = Math.min(24, Math.floor((from - 6) / 7));  // characters of a label
    arcs.setAttribute("width", width); arcs.setAttribute("height", height);
    arcs.setAttribute("aria-label", `${m.name}, ${m.headings[selected.head]}: lines from each token on ` +
      "the left to the tokens on the right that it attends to");
    arcs.replaceChildren();
    const y = (n, first) => (n - first + .5) * rowHeight + 4;
    for (let r = r0; r < r1; r++) for (let c = c0; c < c1; c++) {
      const w = Math.abs(value(r, c)) / m.top;
      if (w < (r === selected.row ? .005 : .05)) continue;
      const half = width / 2, [start, end] = [y(r, r0), y(c, c0)];
      arcs.append(svg("path", {d: `M${from} ${start} C${half} ${start} ${half} ${end} ${to} ${end}`,
        "stroke-width": r === selected.row ? 1 + 3 * w : 1 + w,
        "stroke-opacity": r === selected.row ? .25 + .75 * w : .22 * w}));
    }
    const label = (text, n, first, left) => {
      const node = svg("text", {x: left ? from - 6 : to + 6, y: y(n, first) + 4,
        "text-anchor": left ? "end" : "start"}, truncate(text, longest));
      if (left && n === selected.row) node.style.fontWeight = "bold";
      node.addEventListener("mouseenter", () => {
        if (left && selected.row !== n) { selected.row = n; paint(); }
      });
      node.addEventListener("mousemove", event =>
        show(left ? named("rows", n) : describe(selected.row, n), event));
      node.addEventListener("mouseleave", () => show(null));
      arcs.append(node);
    };
    for (let r = r0; r < r1; r++) label(shownLabels("rows")[r], r, r0, true);
    for (let c = c0; c < c1; c++) label(shownLabels("columns")[c], c, c0, false);
    return r1 - r0 < rows || c1 - c0 < columns ? `tokens ${r0} to ${r1 - 1} of ${rows}` : "";
  }
  const images = new Map();
  function paintImage() {
    const m = map(), {grid, prefixTokens, width, height} = m.image;
    const scale = Math.max(1, Math.floor(480 / Math.max(width, height)));
    overlay.width = width * scale; overlay.height = height * scale;
    overlay.setAttribute("aria-label",
      `the image, bright where ${shownLabels("rows")[selected.row]} attends; ` +
      "use the arrow keys to choose a patch");
    const context = overlay.getContext("2d");
    if (!images.has(selected.map)) {
      const raw = bytes(m.image.pixels), plain = document.createElement("canvas");
      plain.width = width; plain.height = height;
      const inner = plain.getContext("2d"), image = inner.createImageData(width, height);
      for (let p = 0; p < width * height; p++)
        image.data.set([raw[3 * p], raw[3 * p + 1], raw[3 * p + 2], 255], 4 * p);
      inner.putImageData(image, 0, 0);
      images.set(selected.map, plain);
    }
    context.imageSmoothingEnabled = false;
    context.drawImage(images.get(selected.map), 0, 0, overlay.width, overlay.height);
    let largest = 0;
    for (let c = prefixTokens; c < m.shape[2]; c++) largest = Math.max(largest, value(selected.row, c));
    const patchWidth = overlay.width / grid[1], patchHeight = overlay.height / grid[0];
    for (let c = prefixTokens; c < m.shape[2]; c++) {
      const place = c - prefixTokens, x = place % grid[1], y = Math.floor(place / grid[1]);
      const strength = Math.sqrt(Math.max(value(selected.row, c), 0) / (largest || 1));
      context.fillStyle = `rgba(0,0,0,${.75 * (1 - strength)})`;
      context.fillRect(x * patchWidth, y * patchHeight, patchWidth, patchHeight);
      if (c === (m.kind === "self" ? selected.row : selected.column)) {
        context.strokeStyle = "#ff5252"; context.lineWidth = 2;
        context.strokeRect(x * patchWidth + 1, y * patchHeight + 1, patchWidth - 2, patchHeight - 2);
      }
    }
  }
  const patchAt = event => {
    const {grid, prefixTokens} = map().image, box = overlay.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left) / box.width * grid[1]);
    const y = Math.floor((event.clientY - box.top) / box.height * grid[0]);
    return Math.min(Math.max(y, 0), grid[0] - 1) * grid[1] + Math.min(Math.max(x, 0), grid[1] - 1)
      + prefixTokens;
  };
  overlay.addEventListener("mousemove", event => show(describe(selected.row, patchAt(event)), event));
  overlay.addEventListener("mouseleave", () => show(null));
  const choosePatch = patch => {
    selected.column = patch;
    if (map().kind === "self") selected.row = patch;
    select();
  };
  overlay.addEventListener("click", event => choosePatch(patchAt(event)));
  overlay.addEventListener("keydown", event => {
    const {grid, prefixTokens} = map().image, step = {ArrowLeft: [0, -1], ArrowRight: [0, 1],
                                                      ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
    if (!step) return;
    event.preventDefault();
    const chosen = map().kind === "self" ? selected.row : selected.column;
    const patch = Math.max(chosen - prefixTokens, 0);
    const inside = (n, size) => Math.min(Math.max(n, 0), size - 1);
    const y = inside(Math.floor(patch / grid[1]) + step[0], grid[0]);
    choosePatch(prefixTokens + y * grid[1] + inside(patch % grid[1] + step[1], grid[1]));
  });

  function paintView() {
    const m = map();
    let more = "";
    canvas.hidden = selected.view !== "map"; overlay.hidden = selected.view !== "image";
    arcs.style.display = selected.view === "arcs" ? "" : "none";
    if (selected.view === "map") paintMap();
    if (selected.view === "arcs") more = paintArcs();
    if (selected.view === "image") paintImage();
    const [, rows, columns] = m.shape, parts = [];
    if (m.pooled) parts.push(`each value is the largest of several: ${m.full.join(" \u00d7 ")} tokens ` +
      `in ${rows} \u00d7 ${columns} cells`);
    if (selected.view === "map" && Math.min(painted.cellWidth, painted.cellHeight) < 1)
      parts.push("each pixel is the largest of several cells; zoom in to see all");
    if (more) parts.push(more);
    parts.push(m.signed ? `linear scale, largest ${format(m.max)}`
      : `square-root scale, largest ${format(m.max)}` +
        (m.top > m.max ? `, strongest colour ${format(m.top)}` : ""));
    note.textContent = parts.join("; ");
  }
  function paint() {
    const m = map();
    if (selected.view === "image" && !m.image) selected.view = "map";
    if (selected.view === "arcs" && m.kind === "states") selected.view = "map";
    buttons.image.hidden = !m.image; buttons.arcs.hidden = m.kind === "states";
    for (const [name, button] of Object.entries(buttons))
      button.setAttribute("aria-pressed", name === selected.view);
    heading.textContent = `${m.name}, ${m.headings[selected.head]}`;
    paintView(); paintSide(); paintTokens();
  }

  // --- light and dark
  const media = window.matchMedia("(prefers-color-scheme: dark)");
  const prefersDark = () => {
    const {jpThemeLight} = document.body.dataset, classes = [...document.body.classList];
    if (jpThemeLight !== undefined) return jpThemeLight === "false";  // JupyterLab
    if (classes.some(name => /^vscode(-high-contrast)?-light$/.test(name))) return false;
    if (classes.some(name => /^vscode-(dark|high-contrast)$/.test(name))) return true;
    return media.matches;
  };
  const applyTheme = () => {
    const chosen = prefersDark() ? "dark" : "light";
    if (host.dataset.theme === chosen) return;
    host.dataset.theme = theme = chosen;
    paintThumbs();
    if (values) paint();
  };
  media.addEventListener("change", applyTheme);
  new MutationObserver(applyTheme)  // called when the theme of JupyterLab or VS Code changes
    .observe(document.body, {attributeFilter: ["class", "data-jp-theme-light"]});
  window.addEventListener("resize", () => { if (values) paintView(); });
  applyTheme();
  const first = Math.max(0, data.maps.map(m => m.kind).lastIndexOf("cross"));  // the alignment
  if (data.maps[first].image) selected.view = "image";
  else if (data.maps[first].kind === "self") selected.row = data.maps[first].shape[1] - 1;
  choose(first, 0).then(() => host.setAttribute("data-shown", ""));
}
for (const host of document.querySelectorAll(`[data-regard="${key}"]:not([data-ready])`)) {
  host.setAttribute("data-ready", "");
  start(host);
}
})
