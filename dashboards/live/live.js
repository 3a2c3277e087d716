// Polls the server every second for changes, keeps the state of the runs, and draws it.

import {
  createElement, createRow, drawCurves, drawEvents, drawNodeTable, drawTopology, formatDuration, formatNumber, formatState, isDark,
} from "/draw.js";

const byId = (id) => document.getElementById(id);
const ENDED = new Set(["finished", "diverged", "failed"]);
const X_AXES = {round: "rounds", comm_mb: "MB", seconds: "seconds"};
const METRICS = {
  "accuracy-metric": {test_accuracy: "mean model", node_accuracy_mean: "mean over nodes", node_accuracy_min: "worst node"},
  "loss-metric": {test_loss: "test loss", upper_loss: "upper loss", lower_loss: "lower loss"},
  "consensus-metric": {consensus_x: "consensus error of x", consensus_y: "consensus error of y", direction_norm: "norm of the mean direction"},
};
const known = {boot: "", count: 0, runs: new Map(), order: [], columns: []};
let chosenId = null, scrolledId = null, chosenByUser = false, lossByUser = false, xAxis = "round", clockOffset = 0;

const chosenRun = () => known.runs.get(chosenId) ?? null;
const allRuns = () => known.order.map((id) => known.runs.get(id)).filter(Boolean);
const serverTime = () => Date.now() / 1000 + clockOffset;
const ageOf = (run) => run.last.timestamp ? Math.max(0, serverTime() - run.last.timestamp) : null;

/** The state of a run. One without an evaluation for long may hang or be killed, which its files cannot show. */
function stateOf(run) {
  const isStalled = run.state === "running" && ageOf(run) > Math.max(60, 10 * (run.gap ?? 0));
  return isStalled ? "stalled" : run.state;
}

function secondsLeft(run) {
  if (!run.rate || !run.rounds || stateOf(run) !== "running") return null;
  return Math.max(0, (run.rounds - run.last.round) / run.rate - ageOf(run));
}

function update(state) {
  clockOffset = state.now - Date.now() / 1000;
  if (state.boot !== known.boot) known.runs.clear();          // another server: start over
  Object.assign(known, {boot: state.boot, count: state.count, order: state.order, columns: state.columns, group: state});
  for (const run of state.runs) {
    const before = run.reset ? null : known.runs.get(run.id);
    known.runs.set(run.id, {...run, rows: before ? before.rows.concat(run.rows) : run.rows, lost: before?.lost ?? []});
  }
  for (const id of known.runs.keys()) if (!state.order.includes(id)) known.runs.delete(id);
  // Until the user chooses, show the run that is active, or else the last one that was.
  const active = state.order.find((id) => ["running", "recovering"].includes(known.runs.get(id)?.state));
  if (!known.runs.has(chosenId)) chosenByUser = false;
  if (!chosenByUser && (active ?? !known.runs.has(chosenId))) chosenId = active ?? state.order[0] ?? null;
}

function showHeader() {
  const {group} = known, run = chosenRun(), runs = allRuns();
  byId("title").textContent = [group.kind, group.name].filter(Boolean).join(" ");
  const counts = Object.entries(group.states).map(([name, count]) => `${count} ${name}`).join(", ");
  const left = group.left !== null && group.left > 0 ? `, about ${formatDuration(group.left)} left` : "";
  const target = group.target ? ` · target ${group.target}` : "";
  byId("summary").textContent = runs.length > 1 || group.kind ? `${runs.length} runs: ${counts}${left}${target}` : "";
  const isWaiting = group.waiting, note = isWaiting ? `waiting for ${group.folder}: no run has started there yet`
    : group.left_out ? `${group.left_out} more runs are not shown` : "";
  byId("note").hidden = !note;
  byId("note").textContent = note;
  document.title = run ? `${run.last.round ?? 0}/${run.rounds || "?"} ${group.name}` : group.name;
}

function showTiles(run) {
  const {last} = run, state = stateOf(run), hasEnded = ENDED.has(run.state), errors = [run.error, run.problem].filter(Boolean).join("; ");
  byId("chosen").textContent = run.label;
  byId("state").textContent = formatState(state);
  byId("state").className = `badge ${state}`;
  byId("facts").textContent = run.facts.join(" · ");
  byId("parameters").replaceChildren(...run.parameters.flatMap(([name, value]) => [createElement("b", name), document.createTextNode(` ${value}  `)]));
  byId("error").hidden = !errors;
  byId("error").textContent = errors;
  byId("progress").style.width = run.rounds ? `${100 * (last.round ?? 0) / run.rounds}%` : "0";
  const tiles = [
    ["rounds", `${last.round ?? 0} of ${run.rounds || "?"}`],
    last.test_accuracy == null ? ["upper loss", formatNumber(last.upper_loss)] : ["accuracy", formatNumber(last.test_accuracy)],
    ...(last.node_accuracy_min == null ? [] : [["worst node", formatNumber(last.node_accuracy_min)]]),
    ["consensus error", formatNumber(last.consensus_x)],
    ["communication", last.comm_mb == null ? "–" : `${formatNumber(last.comm_mb, 1)} MB`],
    ["training time", last.seconds < 10 ? `${formatNumber(last.seconds, 1)} s` : formatDuration(last.seconds)],
    ["recoveries", String(run.recoveries)],
    ["time left", hasEnded ? "none" : formatDuration(secondsLeft(run))],
    ["last evaluation", ageOf(run) === null ? "none yet" : hasEnded
      ? new Date(last.timestamp * 1000).toLocaleTimeString() : `${formatDuration(ageOf(run))} ago`],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value]) => {
    const tile = createElement("div");
    tile.append(createElement("dt", name), createElement("dd", value));
    return tile;
  }));
}

function createRunRow(run) {
  const {last} = run, tableRow = createElement("tr"), name = createElement("td", undefined, "name"), dot = createElement("span", undefined, "dot");
  dot.style.background = !run.algorithm ? "var(--line)" : isDark() ? run.dark : run.light;
  name.append(dot, document.createTextNode(run.label));
  tableRow.append(name, createElement("td", formatState(stateOf(run)), stateOf(run)), ...[
    `${last.round ?? 0}/${run.rounds || "?"}`, formatNumber(last.test_accuracy), formatNumber(last.upper_loss),
    formatNumber(last.consensus_x), formatNumber(last.comm_mb, 1), formatDuration(secondsLeft(run)),
  ].map((text) => createElement("td", text)));
  tableRow.dataset.run = run.id;
  tableRow.tabIndex = 0;
  tableRow.setAttribute("aria-selected", String(run.id === chosenId));
  return tableRow;
}

function showRunTable() {
  const runs = allRuns(), table = byId("runs"), focused = document.activeElement?.dataset?.run;
  byId("runs-section").hidden = runs.length < 2;
  if (runs.length < 2) return;
  table.tHead.replaceChildren(createRow("th", ["run", "state", "rounds", "accuracy", "upper loss", "consensus error x", "MB", "time left"]));
  table.tBodies[0].replaceChildren(...runs.map(createRunRow));
  if (!chosenByUser && scrolledId !== chosenId) {            // the active run may be far down
    const box = table.parentElement, selected = table.querySelector('[aria-selected="true"]');
    if (selected) box.scrollTop = selected.offsetTop - box.clientHeight / 2;
  }
  scrolledId = chosenId;
  if (focused) table.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus({preventScroll: true});
}

function showCurves() {
  const runs = allRuns(), loss = byId("loss-metric");
  if (!lossByUser) loss.value = runs.some((run) => run.last.test_loss != null) || !runs.some((run) => run.rows.length) ? "test_loss" : "upper_loss";
  for (const [id, log] of [["accuracy", false], ["loss", false], ["consensus", true]]) {
    drawCurves(id, runs, chosenRun(), byId(`${id}-metric`).value, xAxis, known.columns, log);
  }
}

async function showDetails() {
  const run = chosenRun();
  if (!run) return;
  const response = await fetch(`/api/run/${run.id}`);
  if (!response.ok) return;
  const details = await response.json();
  if (details.id !== chosenId) return;
  run.lost = details.events.filter((event) => event.kind === "lost").map((event) => event.after_round);
  byId("loss-marks").hidden = !run.lost.length;
  drawTopology(details.network, details.nodes.apart_x);
  drawNodeTable(details.nodes);
  drawEvents(details.events);
}

/** Show everything; curves and nodes only if there is something new. */
async function show(hasChanged) {
  const run = chosenRun();
  showHeader();
  showRunTable();
  if (run) showTiles(run);
  if (!hasChanged) return;
  await showDetails();
  showCurves();
}

async function chooseRun(id) {
  [chosenId, chosenByUser] = [id, true];
  await show(true);
}

async function poll() {
  const connection = byId("connection");
  let delay = 1000;
  try {
    const response = await fetch(`/api/state?boot=${known.boot}&since=${known.count}`, {signal: AbortSignal.timeout(10000)});
    if (!response.ok) throw new Error(String(response.status));
    const state = await response.json();
    const hasChanged = state.boot !== known.boot || state.count !== known.count;
    update(state);
    await show(hasChanged);
    const runs = [...known.runs.values()], hasEnded = runs.length > 0 && runs.every((run) => ENDED.has(run.state));
    connection.textContent = hasEnded ? "● ended; a restart will be shown" : "● live";
    connection.className = "";
    if (hasEnded) delay = 2000;
  } catch {
    connection.textContent = "○ no connection to the server; retrying";
    connection.className = "lost";
    delay = 1500;
  }
  setTimeout(poll, delay);
}

function addControls() {
  byId("x-axis").append(...Object.entries(X_AXES).map(([key, name]) => {
    const button = createElement("button", name);
    button.setAttribute("aria-pressed", String(key === xAxis));
    button.addEventListener("click", () => {
      xAxis = key;
      for (const other of byId("x-axis").children) other.setAttribute("aria-pressed", String(other === button));
      showCurves();
    });
    return button;
  }));
  for (const [id, options] of Object.entries(METRICS)) {
    byId(id).append(...Object.entries(options).map(([value, name]) => new Option(name, value)));
    byId(id).addEventListener("change", () => {
      lossByUser ||= id === "loss-metric";
      showCurves();
    });
  }
  const runOf = (event) => event.target.closest("tr")?.dataset.run;
  byId("runs").addEventListener("click", (event) => runOf(event) && chooseRun(runOf(event)));
  byId("runs").addEventListener("keydown", (event) => event.key === "Enter" && runOf(event) && chooseRun(runOf(event)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => known.columns.length && show(true));
}

addControls();
poll();
