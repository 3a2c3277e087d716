// Asks the server every second what has changed, keeps it, and has it drawn.

import {curves, dark, element, events, figure, nodes, row, sign, span, topology} from "/draw.js";

const byId = (id) => document.getElementById(id);
const ENDED = new Set(["finished", "diverged", "failed"]);
const AGAINST = {round: "rounds", comm_mb: "MB", seconds: "seconds"};
const CHOICES = {
  "accuracy-of": {test_accuracy: "the mean model", node_accuracy_mean: "the nodes, on average", node_accuracy_min: "the worst node"},
  "loss-of": {test_loss: "test", upper_loss: "upper", lower_loss: "lower"},
  "apart-of": {consensus_x: "consensus error of x", consensus_y: "consensus error of y", hypergradient_norm: "norm of the mean direction"},
};
const known = {boot: "", count: 0, runs: new Map(), order: [], columns: []};
let chosenId = null, shownId = null, byHand = false, against = "round", behind = 0, lossByHand = false;

const chosen = () => known.runs.get(chosenId) ?? null;
const now = () => Date.now() / 1000 + behind;
const age = (run) => run.last.timestamp ? Math.max(0, now() - run.last.timestamp) : null;

/** A run that has said nothing for long may have been killed: its files cannot tell. */
function state(run) {
  const quiet = run.state === "running" && age(run) > Math.max(60, 10 * (run.gap ?? 0));
  return quiet ? "quiet" : run.state;
}

function left(run) {
  if (!run.rate || !run.rounds || state(run) !== "running") return null;
  return Math.max(0, (run.rounds - run.last.round) / run.rate - age(run));
}

function take(told) {
  behind = told.now - Date.now() / 1000;
  if (told.boot !== known.boot) known.runs.clear();          // another server: begin anew
  Object.assign(known, {boot: told.boot, count: told.count, order: told.order, columns: told.columns, group: told});
  for (const run of told.runs) {
    const before = run.reset ? null : known.runs.get(run.id);
    known.runs.set(run.id, {...run, rows: before ? before.rows.concat(run.rows) : run.rows, lost: before?.lost ?? []});
  }
  for (const id of known.runs.keys()) if (!told.order.includes(id)) known.runs.delete(id);
  // Until somebody chooses, the run that goes on is shown; then the last one that was.
  const going = told.order.find((id) => ["running", "recovering"].includes(known.runs.get(id)?.state));
  if (!known.runs.has(chosenId)) byHand = false;
  if (!byHand && (going ?? !known.runs.has(chosenId))) chosenId = going ?? told.order[0] ?? null;
}

function header() {
  const {group} = known, run = chosen(), all = known.order.map((id) => known.runs.get(id)).filter(Boolean);
  byId("title").textContent = [group.kind, group.name].filter(Boolean).join(" ");
  const several = all.length > 1 || group.kind;
  const counts = Object.entries(group.states).map(([name, count]) => `${count} ${name}`).join(", ");
  const rest = group.left !== null && group.left > 0 ? `, about ${span(group.left)} left` : "";
  byId("summary").textContent = several ? `${all.length} runs: ${counts}${rest}${group.target ? ` · target ${group.target}` : ""}` : "";
  byId("note").hidden = !group.left_out;
  byId("note").textContent = group.left_out ? `${group.left_out} further runs are not shown` : "";
  document.title = run ? `${run.last.round ?? 0}/${run.rounds || "?"} ${group.name}` : group.name;
}

function tiles(run) {
  byId("chosen").textContent = run.label;
  byId("state").textContent = sign(state(run));
  byId("state").className = `badge ${state(run) === "quiet" ? "quiet-run" : state(run)}`;
  byId("facts").textContent = run.facts.join(" · ");
  const wrong = [run.error, run.problem].filter(Boolean).join("; ");
  byId("error").hidden = !wrong;
  byId("error").textContent = wrong;
  byId("done").style.width = run.rounds ? `${100 * (run.last.round ?? 0) / run.rounds}%` : "0";
  const last = run.last, rest = left(run);
  const shown = [
    ["rounds", `${last.round ?? 0} of ${run.rounds || "?"}`],
    last.test_accuracy == null ? ["upper loss", figure(last.upper_loss)] : ["accuracy", figure(last.test_accuracy)],
    ...(last.node_accuracy_min == null ? [] : [["worst node", figure(last.node_accuracy_min)]]),
    ["consensus x", figure(last.consensus_x)],
    ["on all links", last.comm_mb == null ? "–" : `${figure(last.comm_mb, 1)} MB`],
    ["training", span(last.seconds)],
    ["recoveries", String(run.recoveries)],
    ENDED.has(run.state) ? ["time left", "none"] : ["time left", rest === null ? "–" : span(rest)],
    ["last evaluation", age(run) === null ? "none yet" : ENDED.has(run.state)
      ? new Date(last.timestamp * 1000).toLocaleTimeString() : `${span(age(run))} ago`],
  ];
  byId("tiles").replaceChildren(...shown.map(([name, value]) => {
    const made = element("div");
    made.append(element("dt", name), element("dd", value));
    return made;
  }));
}

function table() {
  const all = known.order.map((id) => known.runs.get(id)).filter(Boolean);
  byId("runs-section").hidden = all.length < 2;
  if (all.length < 2) return;
  const shown = byId("runs"), focused = document.activeElement?.dataset?.run;
  shown.tHead.replaceChildren(row("th", ["run", "state", "rounds", "accuracy", "upper loss", "consensus x", "MB", "time left"]));
  shown.tBodies[0].replaceChildren(...all.map((run) => {
    const {last} = run, made = element("tr"), name = element("td", undefined, "name"), dot = element("span", undefined, "dot");
    dot.style.background = !run.algorithm ? "var(--line)" : dark() ? run.dark : run.light;
    name.append(dot, document.createTextNode(run.label));
    made.append(name, element("td", sign(state(run)), state(run) === "quiet" ? "quiet-run" : state(run)), ...[
      `${last.round ?? 0}/${run.rounds || "?"}`, figure(last.test_accuracy), figure(last.upper_loss),
      figure(last.consensus_x), figure(last.comm_mb, 1), span(left(run)),
    ].map((text) => element("td", text)));
    made.dataset.run = run.id;
    made.tabIndex = 0;
    made.setAttribute("aria-selected", String(run.id === chosenId));
    return made;
  }));
  if (!byHand && shownId !== chosenId) {            // the run that goes on now may be far down
    const box = shown.parentElement, found = shown.querySelector('[aria-selected="true"]');
    if (found) box.scrollTop = found.offsetTop - box.clientHeight / 2;
  }
  shownId = chosenId;
  if (focused) shown.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus({preventScroll: true});
}

function draw() {
  const runs = known.order.map((id) => known.runs.get(id)).filter(Boolean);
  const loss = byId("loss-of");
  if (!lossByHand) loss.value = runs.some((run) => run.last.test_loss != null) || !runs.some((run) => run.rows.length) ? "test_loss" : "upper_loss";
  for (const [id, choice, log] of [["accuracy", "accuracy-of", false], ["loss", "loss-of", false], ["apart", "apart-of", true]]) {
    curves(id, runs, chosen(), byId(choice).value, against, known.columns, log);
  }
}

async function detail() {
  const run = chosen();
  if (!run) return;
  const answer = await fetch(`/api/run/${run.id}`);
  if (!answer.ok) return;
  const told = await answer.json();
  if (told.id !== chosenId) return;
  run.lost = told.events.filter((event) => event.kind === "lost").map((event) => event.after_round);
  byId("marks").hidden = !run.lost.length;
  topology(told.network, told.nodes.apart_x);
  nodes(told.nodes);
  events(told.events);
}

/** Everything again; curves and nodes only if something in them is new. */
async function show(fresh) {
  header();
  table();
  const run = chosen();
  if (run) tiles(run);
  if (!fresh) return;
  await detail();
  draw();
}

async function choose(id) {
  [chosenId, byHand] = [id, true];
  await show(true);
}

async function ask() {
  const link = byId("link");
  let wait = 1000;
  try {
    const answer = await fetch(`/api/state?boot=${known.boot}&since=${known.count}`, {signal: AbortSignal.timeout(10000)});
    if (!answer.ok) throw new Error(String(answer.status));
    const told = await answer.json();
    const fresh = told.boot !== known.boot || told.count !== known.count;
    take(told);
    await show(fresh);
    const all = [...known.runs.values()], over = all.length > 0 && all.every((run) => ENDED.has(run.state));
    link.textContent = over ? "● ended; a new start is noticed" : "● live";
    link.className = "";
    if (over) wait = 2000;
  } catch {
    link.textContent = "○ the server does not answer; trying again";
    link.className = "lost";
    wait = 1500;
  }
  setTimeout(ask, wait);
}

function controls() {
  byId("against").append(...Object.entries(AGAINST).map(([key, name]) => {
    const button = element("button", name);
    button.setAttribute("aria-pressed", String(key === against));
    button.addEventListener("click", () => {
      against = key;
      for (const other of byId("against").children) other.setAttribute("aria-pressed", String(other === button));
      draw();
    });
    return button;
  }));
  for (const [id, options] of Object.entries(CHOICES)) {
    byId(id).append(...Object.entries(options).map(([value, name]) => new Option(name, value)));
    byId(id).addEventListener("change", () => {
      lossByHand ||= id === "loss-of";
      draw();
    });
  }
  const picked = (event) => event.target.closest("tr")?.dataset.run;
  byId("runs").addEventListener("click", (event) => picked(event) && choose(picked(event)));
  byId("runs").addEventListener("keydown", (event) => event.key === "Enter" && picked(event) && choose(picked(event)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => known.columns.length && show(true));
}

controls();
ask();
