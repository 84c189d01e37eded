// SPDX-License-Identifier: Apache-2.0
// What happened, in words: a step, and the lives of blocks and requests.
"use strict";

const link = (where, text, of = step) => `<a href="#step=${of}${where}">${text}</a>`;
const requestLink = (request) =>
  link(`&request=${encodeURIComponent(meta.requests[request])}`, escaped(meta.requests[request]));
const blockLink = (block) => link(`&block=${block}`, block);

function several(items, shown) {
  const more = items.length - NAMES_MAX;
  const first = items.slice(0, NAMES_MAX).map(shown).join(", ");
  return more > 0 ? `${first} and ${more.toLocaleString("en")} more` : first;
}

// Blocks in a row as "4–9".
function ranges(blocks) {
  const runs = [];
  for (const block of blocks) {
    const run = runs.at(-1);
    if (run && Math.abs(block - run[1]) === 1 && (run[0] === run[1] || (block > run[1]) === (run[1] > run[0])))
      run[1] = block;
    else runs.push([block, block]);
  }
  return several(runs, ([from, to]) => from === to ? blockLink(from) : `${blockLink(from)}–${blockLink(to)}`);
}

function callWords(at) {
  const name = meta.calls[K[at]], outcome = meta.outcomes[Z[at]], y = Y[at];
  let named = X[at] && !LISTS.has(K[at]) ? requestLink(X[at] - 1) : "";
  if (LISTS.has(K[at])) named = several(meta.lists[X[at]], requestLink);
  let words = `<b>${name}</b>${K[at] === CALL.append ? " to" : ""} ${named}`;
  if (name === "fork") words += ` of ${requestLink(y)}`;
  else if (name === "get_computed_blocks") words += Z[at] ? "" : ` finds ${count(y, "token")}`;
  else if (name === "add_request" || name === "allocate_slots") words += `: ${count(y, "token")}`;
  else if (!LISTS.has(K[at]) && y) words += `: ${y.toLocaleString("en")}`;
  if (K[at + 1] === KIND.refused && at + 1 < K.length)
    words += ` <span class="warn">${outcome}: needs ${count(X[at + 1], "block")}, `
      + `${Y[at + 1]} available, ${Z[at + 1]} pending</span>`;
  else if (Z[at]) words += ` <span class="warn">${escaped(outcome)}</span>`;
  return words;
}

const WORDS = { // of an event, before its blocks and behind them
  take: ["takes"], take_evicting: ["takes"], hit: ["hits"], drop: ["gives up", ", which others keep"],
  freed: ["gives back"], freed_cached: ["gives back", ", still cached"], free: ["no pin or operation holds"],
  hold: ["a pin or an operation holds"], forget: ["no look-up can find"], copy: ["copied to"],
  swap_out: ["swapped out:"], swap_in: ["swapped in:"], store: ["stored:"], load: ["loaded:"],
};

// Events as rows [event, words]: block events of one kind, request and origin in one row.
function rowsOf(events, ofRequest = null) {
  const rows = [];
  let group = null;
  for (const at of events) {
    const kind = K[at];
    if (kind >= meta.first_call) {
      group = null;
      rows.push([at, callWords(at)]);
    } else if (kind === KIND.reset || kind === KIND.forget_all) {
      group = null;
      rows.push([at, kind === KIND.reset ? "the state that the record begins with" : "nothing cached is findable any more"]);
    } else if (kind in meta.kinds && WORDS[meta.kinds[kind]]) {
      const of = isTake(kind) || isDrop(kind) ? Y[at] : -1;
      const from = kind === KIND.hit || kind === KIND.take_evicting ? whose[at] : 0;
      const same = group && group.kind === kind && group.of === of && group.from === from
        && stepOf(group.at) === stepOf(at);
      if (!same) rows.push([at, group = { at, kind, of, from, blocks: [] }]);
      group.blocks.push(X[at]);
    }
  }
  return rows.map(([at, row]) => [at, typeof row === "string" ? row : groupWords(row, ofRequest)]);
}

function groupWords({ at, kind, of, from, blocks }, request) {
  const who = of >= 0 && of !== request ? `${requestLink(of)} ` : "";
  const which = blocks.length === 1 ? `block ${ranges(blocks)}` : `${count(blocks.length, "block")}: ${ranges(blocks)}`;
  const [before, behind = ""] = WORDS[meta.kinds[kind]];
  let words = `${who}${before} ${which}${behind}`;
  if (kind === KIND.copy) words = `block ${blockLink(Z[at])} is copied to ${ranges(blocks)}`;
  const whom = from ? requestLink(from - 1) : "an unknown request";
  if (kind === KIND.take_evicting) words += `, <span class="evicts">evicts what ${whom} wrote</span>`;
  if (kind === KIND.hit) words += `, <span class="hits">written by ${from - 1 === of ? "itself" : whom}</span>`;
  return words;
}

// Rows of a life as a table around the step that is shown, which is scrolled to.
function showLife(rows) {
  const next = rows.findIndex(([at]) => at > ends[step]), middle = next < 0 ? rows.length : next;
  const from = Math.max(0, Math.min(middle - ROWS_MAX / 2, rows.length - ROWS_MAX));
  const shown = rows.slice(from, from + ROWS_MAX), left = rows.length - shown.length;
  const note = left ? `<p class="faint">${count(left, "row")} further from this step left out.</p>` : "";
  const lines = shown.map(([at, words]) => {
    const of = stepOf(at), kind = of === step ? "now" : of > step ? "later" : "";
    return `<tr class="${kind}"><td>${link(selectedWhere(), of.toLocaleString("en"), of)}</td><td>${words}</td></tr>`;
  });
  $("life").innerHTML = `${note}<table><thead><tr><th>step</th><th>what happened</th></tr></thead>`
    + `<tbody>${lines.join("")}</tbody></table>`;
  const row = $("life").querySelectorAll("tbody tr")[middle - from - 1];
  $("life").scrollTop = row ? row.offsetTop - $("life").clientHeight / 2 : 0;
}

const selectedWhere = () => !selected ? "" : selected.block !== undefined ? `&block=${selected.block}`
  : `&request=${encodeURIComponent(meta.requests[selected.request])}`;

function blockWords(pool, block) {
  if (block < FIRST) return "the null block, never used";
  const writer = pool.writer[block] ? `, written by ${meta.requests[pool.writer[block] - 1]}` : "";
  if (!pool.used[block]) return pool.cached[block] ? `free, cached${writer}` : "free";
  if (!pool.owners[block]) return `held by a pin or an operation${writer}`;
  if (pool.owners[block] > 1) return `shared by ${pool.owners[block]} tables${writer}`;
  return `owned by ${meta.requests[pool.owner[block] - 1]}${writer}`;
}

// Tokens that a request was appended: rows [event, words] for each run of steps.
function appended(request) {
  const has = meta.lists.map((list) => list.includes(request)), rows = [];
  let run = null, last = -2;
  const close = () => run && rows.push([run.at, `decodes ${count(run.size, "token")} up to step ${link(selectedWhere(), last.toLocaleString("en"), last)}`]);
  for (let at = 0, of = 0; at < K.length; at++) {
    if (K[at] === KIND.batch) of++;
    if (K[at] !== CALL.append || !has[X[at]] || Z[at]) continue;
    if (of > last + 1) {
      close();
      run = { at, size: 0 };
    }
    run.size++;
    last = of;
  }
  close();
  return rows;
}

function tableOf(request) {
  const table = new Map();
  for (const at of ofRequest(request)) {
    if (at > ends[step]) break;
    if (isTake(K[at])) table.set(Z[at], X[at]);
    else if (isDrop(K[at]) && table.get(Z[at]) === X[at]) table.delete(Z[at]);
  }
  return table;
}

function drawDetail(pool, table) {
  $("detail").hidden = !selected;
  if (!selected) return;
  if (selected.block !== undefined) {
    const block = selected.block;
    $("what").textContent = `Block ${block}`;
    $("facts").textContent = `At step ${step.toLocaleString("en")}: ${blockWords(pool, block)}.`;
    $("table").innerHTML = "";
    showLife(rowsOf(ofBlock(block)));
    return;
  }
  const request = selected.request, groups = meta.groups.map(() => []);
  $("what").textContent = `Request ${meta.requests[request]}`;
  for (const [place, block] of [...table].sort((a, b) => a[0] - b[0])) groups[place % groups.length].push(block);
  $("facts").textContent = `At step ${step.toLocaleString("en")}: ${count(table.size, "block")}.`;
  $("table").innerHTML = groups.map((blocks, group) => !blocks.length ? "" :
    `<p>${groups.length > 1 ? `Group ${group} (${meta.groups[group]})` : "Table"}: ${ranges(blocks)}</p>`).join("");
  if (selected.rows === undefined) selected.rows = appended(request);
  const events = ofRequest(request), rows = rowsOf(events, request);
  for (const row of rows) if (K[row[0]] === CALL.free && !Z[row[0]]
    && events.some((at) => at > row[0] && K[at] === CALL.allocate_slots)) row[1] += " (preempted: admitted again later)";
  showLife([...rows, ...selected.rows].sort((a, b) => a[0] - b[0]));
}

function drawStep() {
  const from = step ? ends[step - 1] + 1 : 0, events = [];
  for (let at = from; at < ends[step] && events.length < 20000; at++) events.push(at);
  const rows = step ? rowsOf(events) : [];
  const lines = rows.slice(0, ROWS_MAX).map(([, words]) => `<li>${words}</li>`);
  if (rows.length > ROWS_MAX) lines.push(`<li class="faint">${count(rows.length - ROWS_MAX, "more row")}</li>`);
  const call = Y[ends[step]], goesOn = K[from] === KIND.reset;
  $("did").textContent = !step ? "Step 0: the state at the beginning"
    : `Step ${step.toLocaleString("en")}: ${call ? `batch ${X[ends[step]].toLocaleString("en")}, taken by call ${call.toLocaleString("en")}` : goesOn ? "the state from which the record goes on" : "the open batch, which was never taken"}`;
  $("events").innerHTML = lines.join("") || `<li class="faint">${step ? "Nothing was called, and no block changed." : "What is there was there before the record began."}</li>`;
}
