// SPDX-License-Identifier: Apache-2.0
// What the reader does: slider, keys, search, links (#step=3&block=5).
"use strict";

function go(to, keep = false) {
  step = Math.max(0, Math.min(ends.length - 1, Math.round(+to) || 0));
  draw();
  if (!keep) history.replaceState(null, "", `#step=${step}${selectedWhere()}`);
}

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  step = Math.max(0, Math.min(ends.length - 1, Math.floor(+given.get("step")) || 0));
  selected = null;
  if (given.has("block")) choose("block", given.get("block"));
  else if (given.has("request")) choose("request", given.get("request"));
  go(step, true);
}

// Select what was typed or linked, and return whether it is known. Of equal ids, take the newest
// before the step.
function choose(kind, text) {
  selected = null;
  if (kind !== "request" && /^\d+$/.test(text) && +text < NUM_BLOCKS) selected = { block: +text };
  if (kind !== "block") {
    let found = -1;
    meta.requests.forEach((name, request) => {
      if (name === text && (found < 0 || ofRequest(request)[0] <= ends[step])) found = request;
    });
    if (found >= 0) selected = { request: found };
  }
  return selected !== null;
}

function search() {
  const text = $("search").value.trim(), words = /^block\s+(\d+)$/i.exec(text);
  const known = words ? choose("block", words[1]) : choose("request", text) || choose("block", text);
  $("missing").textContent = known || !text ? "" : `No request or block “${text}”.`;
  if (known) {
    const events = selected.block !== undefined ? ofBlock(selected.block) : ofRequest(selected.request);
    const there = selected.request !== undefined && events.length && (events[0] > ends[step] || events.at(-1) < ends[step] && !tableOf(selected.request).size);
    if (there) step = stepOf(events[0]);
  }
  go(step);
  if (known) $("what").focus();
}

function play(on) {
  clearInterval(timer);
  timer = 0;
  $("play").textContent = on ? "Pause" : "Play";
  if (!on) return;
  if (step === ends.length - 1) go(0);
  const rate = +$("rate").value, pause = Math.max(50, 1000 / rate);
  timer = setInterval(() => {
    go(step + Math.max(1, Math.round(rate * pause / 1000)));
    if (step === ends.length - 1) play(false);
  }, pause);
}

function blockAt(event) {
  const box = $("grid").getBoundingClientRect(), size = grid.cell / grid.ratio;
  const column = Math.floor((event.clientX - box.left) / size), row = Math.floor((event.clientY - box.top) / size);
  const block = row * grid.columns + column;
  return column >= 0 && column < grid.columns && block >= 0 && block < NUM_BLOCKS ? block : null;
}

function select(block) {
  selected = { block };
  go(step);
}

function onGridKey(event) {
  const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid.columns, ArrowDown: grid.columns };
  if (!(event.key in moves)) return;
  event.preventDefault();
  event.stopPropagation();
  const block = (selected?.block ?? FIRST - moves[event.key]) + moves[event.key];
  if (block >= 0 && block < NUM_BLOCKS) select(block);
  $("tip").textContent = `Block ${selected?.block}: ${blockWords(poolAt(step), selected?.block ?? 0)}`;
}

function onKey(event) {
  if (/^(INPUT|SELECT|TEXTAREA|BUTTON)$/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
  const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -100, PageDown: 100 };
  if (event.key in moves && (event.key.startsWith("Arrow") || event.shiftKey)) go(step + moves[event.key]);
  else if (event.key === " ") play(!timer);
  else if (event.key === "/") $("search").focus();
  else return;
  event.preventDefault();
}

function measure() {
  readColours();
  looks.clear();
  stripImage = null;
  const roomy = window.innerWidth > 900;
  grid = layOut($("grid"), NUM_BLOCKS, roomy ? 400 : 300);
  if (NUM_HOST) hostGrid = layOut($("host"), NUM_HOST, 120);
}

function listen() {
  $("slider").max = $("number").max = ends.length - 1;
  $("last").textContent = (ends.length - 1).toLocaleString("en");
  $("slider").addEventListener("input", (event) => go(event.target.value));
  $("number").addEventListener("change", (event) => go(event.target.value));
  $("back").addEventListener("click", () => go(step - 1));
  $("on").addEventListener("click", () => go(step + 1));
  $("play").addEventListener("click", () => play(!timer));
  $("rate").addEventListener("change", () => timer && play(true));
  $("close").addEventListener("click", () => (selected = null, go(step)));
  $("find").addEventListener("submit", (event) => (event.preventDefault(), search()));
  $("strip").addEventListener("click", (event) => go(event.offsetX / $("strip").clientWidth * ends.length - 0.5));
  $("grid").addEventListener("pointermove", (event) => {
    const block = blockAt(event);
    $("tip").textContent = block === null ? "" : `Block ${block}: ${blockWords(poolAt(step), block)}`;
  });
  $("grid").addEventListener("click", (event) => blockAt(event) !== null && select(blockAt(event)));
  $("grid").addEventListener("keydown", onGridKey);
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", readHash);
  const again = () => (measure(), draw());
  window.addEventListener("resize", again);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
}

async function start() {
  const texts = [...document.querySelectorAll("script.events")];
  const sections = [];
  for (const each of texts) {
    sections.push(await readSection(each.textContent.trim()));
    each.remove();
  }
  K = joined(sections.map((each) => each[0]), Uint8Array);
  [X, Y, Z] = [1, 2, 3].map((column) => joined(sections.map((each) => each[column]), Int32Array));
  follow();
  ofBlock = index(NUM_BLOCKS, blockOf);
  ofRequest = index(meta.requests.length, requestOf);
  $("hosted").hidden = !NUM_HOST;
  $("main").hidden = false;
  $("loading").remove();
  measure();
  listen();
  readHash();
}

start().catch((error) => {
  const place = $("loading") ?? document.body.appendChild(document.createElement("p"));
  place.textContent = `This page cannot be shown: ${error.message}. It needs a browser of 2023 or newer.`;
  place.className = "warn";
  throw error;
});
