// SPDX-License-Identifier: Apache-2.0
// The grid of blocks and the strip over all steps, as pixels.
"use strict";

let colours = {}, grid = null;

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "faint", "grid", "blue", "orange", "green", "red", "page", "card"]) {
    const text = style.getPropertyValue(`--c-${name}`).trim();
    colours[name] = [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  }
  colours.light = colours.page[0] > 128 ? 0.5 : 0.6;
}

const packed = ([red, green, blue]) => (255 << 24 | blue << 16 | green << 8 | red) >>> 0;
const mixed = (a, b, share) => a.map((value, at) => Math.round(value * (1 - share) + b[at] * share));

// A colour for a request: neighbours in time are far apart in hue.
function colourOf(request) {
  const hue = request * 137.508 % 360, light = colours.light, chroma = 0.6 * Math.min(light, 1 - light);
  return [0, 8, 4].map((at) => {
    const place = (at + hue / 30) % 12;
    return Math.round(255 * (light - chroma * Math.max(-1, Math.min(place - 3, 9 - place, 1))));
  });
}

function layOut(canvas, size, heightMost) {
  const ratio = window.devicePixelRatio || 1, width = Math.max(60, Math.floor(canvas.parentElement.clientWidth * ratio));
  const cell = Math.max(2, Math.min(Math.floor(22 * ratio), Math.floor(Math.sqrt(width * heightMost * ratio / size))));
  const columns = Math.max(1, Math.floor(width / cell)), rows = Math.ceil(size / columns);
  canvas.width = columns * cell;
  canvas.height = rows * cell;
  canvas.style.width = `${canvas.width / ratio}px`;
  return { cell, columns, ratio, image: canvas.getContext("2d").createImageData(canvas.width, canvas.height) };
}

function fill(pixels, width, left, top, size, colour) {
  for (let y = top; y < top + size; y++) pixels.fill(colour, y * width + left, y * width + left + size);
}

// A block is filled in its writer's colour if used, pale if cached; a dot: several owners.
function drawCells(canvas, { cell, columns, image }, size, lookOf) {
  const pixels = new Uint32Array(image.data.buffer), width = canvas.width, gap = cell > 4 ? 1 : 0;
  pixels.fill(packed(colours.page));
  const ink = packed(colours.ink), page = packed(colours.page);
  for (let block = 0; block < size; block++) {
    const left = block % columns * cell, top = Math.floor(block / columns) * cell;
    const [colour, dot, framed] = lookOf(block);
    if (framed) fill(pixels, width, left, top, cell, ink);
    const inset = framed && cell > 6 ? 2 : gap;
    fill(pixels, width, left + inset, top + inset, cell - inset - (framed ? inset : 0), colour);
    if (dot) fill(pixels, width, left + (cell >> 1) - (cell >> 3), top + (cell >> 1) - (cell >> 3), Math.max(1, cell >> 2), page);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

const looks = new Map();
function look(request, pale) {
  const key = request * 2 + pale;
  if (!looks.has(key)) looks.set(key, packed(mixed(colourOf(request), colours.page, pale ? 0.72 : 0)));
  return looks.get(key);
}

function drawPool(pool, table) {
  const free = packed(colours.grid), held = packed(colours.faint), chosen = new Set(table?.values());
  const dim = packed(mixed(colours.grid, colours.page, 0.6)), page = packed(colours.page);
  drawCells($("grid"), grid, NUM_BLOCKS, (block) => {
    const framed = selected?.block === block;
    if (block < FIRST) return [page, false, framed];
    if (table && !chosen.has(block)) return [pool.used[block] ? free : dim, false, framed];
    if (!pool.used[block]) return [pool.cached[block] ? pool.writer[block] ? look(pool.writer[block] - 1, 1) : dim : free, false, framed];
    const owners = pool.owners[block];
    if (!owners) return [held, false, framed];
    return [look(owners === 1 ? pool.owner[block] - 1 : Math.max(0, pool.writer[block] - 1), 0), owners > 1, framed];
  });
  if (NUM_HOST) drawCells($("host"), hostGrid, NUM_HOST, (block) => {
    const has = pool.host[block];
    return [has > 1 ? look(has - 2, 0) : has ? dim : free, false, false];
  });
}

let hostGrid = null;

// Use over all steps, evictions in orange below, refusals in red above, and where we are.
let stripImage = null;
function drawStrip() {
  const canvas = $("strip"), context = canvas.getContext("2d"), ratio = window.devicePixelRatio || 1;
  if (!stripImage) {
    canvas.width = Math.floor(canvas.clientWidth * ratio);
    canvas.height = Math.floor(canvas.clientHeight * ratio);
    const { width, height } = canvas, total = ends.length, low = height - 5 * ratio, high = 5 * ratio;
    const css = (name) => `rgb(${colours[name].join()})`;
    context.fillStyle = css("card");
    context.fillRect(0, 0, width, height);
    for (let x = 0; x < width; x++) {
      const from = Math.floor(x * total / width), to = Math.max(from + 1, Math.floor((x + 1) * total / width));
      let most = 0, both = 0, evicts = 0, refuses = 0;
      for (let of = from; of < to; of++) {
        most = Math.max(most, used[of]);
        both = Math.max(both, used[of] + cached[of]);
        evicts += evicted[of];
        refuses += refused[of];
      }
      const scale = (low - high) / (NUM_BLOCKS - FIRST);
      const bar = (name, from, to) => (context.fillStyle = css(name), context.fillRect(x, from, 1, to - from));
      context.globalAlpha = 0.35;
      bar("blue", low - both * scale, low);
      context.globalAlpha = 1;
      bar("blue", low - most * scale, low);
      if (evicts) bar("orange", low + ratio, height);
      if (refuses) bar("red", 0, high - ratio);
    }
    stripImage = context.getImageData(0, 0, width, height);
  }
  context.putImageData(stripImage, 0, 0);
  context.fillStyle = `rgb(${colours.ink.join()})`;
  context.fillRect(Math.min(canvas.width - 2 * ratio, step * canvas.width / ends.length), 0, 2 * ratio, canvas.height);
}

function draw() {
  const pool = poolAt(step), table = selected?.request !== undefined ? tableOf(selected.request) : null;
  drawPool(pool, table?.size ? table : null);
  drawStrip();
  $("slider").value = $("number").value = step;
  $("slider").setAttribute("aria-valuetext", `step ${step}`);
  const free = NUM_BLOCKS - FIRST - used[step] - cached[step];
  const figures = { used: used[step], cached: cached[step], free, evicted: evicted[step] };
  for (const [name, figure] of Object.entries(figures)) $(name).textContent = figure.toLocaleString("en");
  const waits = cached[step] + free - Z[ends[step]];
  $("waits").textContent = waits > 0 ? `${count(waits, "block")} of these cannot be taken until batches in flight end.` : "";
  drawStep();
  drawDetail(pool, table);
}
