// SPDX-License-Identifier: Apache-2.0
// The events of a record (columns.py says what they mean), and the pool after any step.
"use strict";

const meta = JSON.parse(document.getElementById("meta").textContent);
const $ = (id) => document.getElementById(id);
const KIND = Object.fromEntries(meta.kinds.map((name, kind) => [name, kind]));
const CALL = Object.fromEntries(Object.entries(meta.calls).map(([kind, name]) => [name, +kind]));
const LISTS = new Set(["append", "swap_out", "swap_in", "rewind"].map((name) => CALL[name]));
const NUM_BLOCKS = meta.num_blocks, NUM_HOST = meta.num_host_blocks, FIRST = meta.first_block;
const ROWS_MAX = 300, NAMES_MAX = 8, KEYFRAME_BYTES = 2e8;
const isTake = (kind) => kind === KIND.take || kind === KIND.take_evicting || kind === KIND.hit;
const isDrop = (kind) => kind === KIND.drop || kind === KIND.freed || kind === KIND.freed_cached;
const count = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
const escaped = (text) => text.replace(/[&<>"]/g, (each) => `&#${each.charCodeAt(0)};`);

// The events: kind, x, y, z, and whose content it was (a request + 1, 0 for none's).
let K, X, Y, Z, whose, ofBlock, ofRequest, keyframes = [], ends = [], now = null, nowStep = -1;
let used, cached, evicted, refused, selected = null, step = 0, timer = 0;

async function readSection(text) {
  const packed = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text)
    : Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = new DataView(bytes.buffer).getUint32(0, true);
  const kinds = bytes.subarray(4, 4 + size), columns = [];
  for (let column = 0; column < 3; column++) {
    const base = 4 + size + column * 4 * size, last = new Int32Array(256);
    const values = new Int32Array(size);
    for (let at = 0; at < size; at++) {
      const word = bytes[base + at] | bytes[base + size + at] << 8
        | bytes[base + 2 * size + at] << 16 | bytes[base + 3 * size + at] << 24;
      values[at] = last[kinds[at]] += (word >>> 1) ^ -(word & 1);
    }
    columns.push(values);
  }
  return [kinds, ...columns];
}

const joined = (parts, type) => {
  const all = new type(parts.reduce((sum, each) => sum + each.length, 0));
  parts.reduce((at, each) => (all.set(each, at), at + each.length), 0);
  return all;
};

const emptyPool = () => ({
  used: new Uint8Array(NUM_BLOCKS), cached: new Uint8Array(NUM_BLOCKS),
  owners: new Uint16Array(NUM_BLOCKS), // tables that have it
  owner: new Int32Array(NUM_BLOCKS), // their requests + 1, xor: of one owner, itself
  writer: new Int32Array(NUM_BLOCKS), host: new Int32Array(NUM_HOST),
});
const copyOf = (pool) => Object.fromEntries(
  Object.entries(pool).map(([name, column]) => [name, column.slice()]));

function apply(pool, at) {
  const kind = K[at], block = X[at], request = Y[at] + 1;
  if (isTake(kind)) {
    pool.used[block] = 1;
    pool.cached[block] = 0;
    pool.owners[block]++;
    pool.owner[block] ^= request;
    if (kind !== KIND.hit) pool.writer[block] = request;
  } else if (isDrop(kind) || kind === KIND.free) {
    if (kind !== KIND.free) {
      pool.owners[block]--;
      pool.owner[block] ^= request;
    }
    if (kind === KIND.drop) return;
    pool.used[block] = 0;
    pool.cached[block] = kind === KIND.freed_cached || (kind === KIND.free && Z[at]) ? 1 : 0;
    if (!pool.cached[block]) pool.writer[block] = 0;
  } else if (kind === KIND.hold) {
    pool.used[block] = 1;
    pool.cached[block] = 0;
  } else if (kind === KIND.forget) {
    pool.cached[block] = 0;
    if (!pool.used[block]) pool.writer[block] = 0;
  } else if (kind === KIND.forget_all) pool.cached.fill(0);
  else if (kind === KIND.host) pool.host[block] = Y[at];
  else if (kind === KIND.reset) Object.values(pool).forEach((column) => column.fill(0));
}

// One pass over all events: blocks of drops, whose content was hit or evicted, keyframes.
function follow() {
  const pool = emptyPool(), figures = [[], [], [], []];
  const bytes = NUM_BLOCKS * 12 + NUM_HOST * 4;
  const spacing = Math.max(1 << 14, K.length / (KEYFRAME_BYTES / bytes));
  let tables = new Map(), last = 0, numUsed = 0, numCached = 0, numEvicted = 0, numRefused = 0;
  whose = new Int32Array(K.length);
  for (let at = 0; at < K.length; at++) {
    const kind = K[at];
    if (isTake(kind)) {
      if (kind !== KIND.take) whose[at] = pool.writer[X[at]];
      if (!tables.has(Y[at])) tables.set(Y[at], new Map());
      tables.get(Y[at]).set(Z[at], X[at]);
    } else if (isDrop(kind)) {
      const table = tables.get(Y[at]);
      if (X[at]) X[at]--;
      else {
        X[at] = table.get(Z[at]);
        table.delete(Z[at]);
      }
      whose[at] = pool.writer[X[at]];
    } else if (kind === KIND.reset) tables = new Map();
    else if (kind === KIND.refused) numRefused++;
    numEvicted += kind === KIND.take_evicting;
    const block = X[at], counted = kind >= KIND.take && kind <= KIND.forget;
    if (counted) {
      numUsed -= pool.used[block];
      numCached -= pool.cached[block];
    } else if (kind === KIND.forget_all || kind === KIND.reset) numCached = 0;
    if (kind === KIND.reset) numUsed = 0;
    apply(pool, at);
    if (counted) {
      numUsed += pool.used[block];
      numCached += pool.cached[block];
    }
    if (kind !== KIND.batch) continue;
    [numUsed, numCached, numEvicted, numRefused].forEach((each, row) => figures[row].push(each));
    if (!ends.length || at - last >= spacing) {
      keyframes.push([ends.length, copyOf(pool)]);
      last = at;
    }
    numEvicted = numRefused = 0;
    ends.push(at);
  }
  [used, cached, evicted, refused] = figures;
}

// For each of `size` things, the events in which it is named, in order.
function index(size, namesOf) {
  const starts = new Uint32Array(size + 1);
  for (let at = 0; at < K.length; at++) for (const each of namesOf(at)) starts[each + 1]++;
  for (let each = 0; each < size; each++) starts[each + 1] += starts[each];
  const places = starts.slice(), events = new Uint32Array(starts[size]);
  for (let at = 0; at < K.length; at++) for (const each of namesOf(at)) events[places[each]++] = at;
  return (each) => events.subarray(starts[each], starts[each + 1]);
}

const one = [0], none = [];
const just = (each) => (one[0] = each, one);
const blockOf = (at) => K[at] === KIND.copy ? [X[at], Z[at]]
  : K[at] >= KIND.take && K[at] <= KIND.load && K[at] !== KIND.forget_all ? just(X[at]) : none;
function requestOf(at) {
  const kind = K[at];
  if (isTake(kind) || isDrop(kind)) return just(Y[at]);
  if (kind < meta.first_call || kind === CALL.append) return none;
  return LISTS.has(kind) ? meta.lists[X[at]] : X[at] ? just(X[at] - 1) : none;
}

function poolAt(wanted) {
  let low = 0, high = keyframes.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (keyframes[middle][0] <= wanted) low = middle; else high = middle - 1;
  }
  if (now === null || nowStep > wanted || nowStep < keyframes[low][0]) {
    now = copyOf(keyframes[low][1]);
    nowStep = keyframes[low][0];
  }
  for (let at = ends[nowStep] + 1; at <= ends[wanted]; at++) apply(now, at);
  nowStep = wanted;
  return now;
}

function stepOf(at) {
  let low = 0, high = ends.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] >= at) high = middle; else low = middle + 1;
  }
  return low;
}
