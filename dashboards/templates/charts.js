"use strict";
// Builds the charts: each function returns plotly's traces and layout of one panel, from the data in the page.

const DATA = JSON.parse(document.getElementById("data").textContent);
const MANY_CURVES = 16;                         // in one panel: thinner lines, no shades
const hidden = new Set();                       // entries of the legend that the reader switched off, in all figures
const escapeHtml = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const cssVariable = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => document.documentElement.dataset.theme === "dark";
const isNarrow = () => document.documentElement.clientWidth < 620;
const colourOf = series => DATA.styles[series][isDark() ? 1 : 0];
const dashOf = series => DATA.styles[series][2];
const keepFinite = values => values.filter(v => v !== null && Number.isFinite(v));
const smallest = values => values.reduce((a, b) => Math.min(a, b), Infinity);
const largest = values => values.reduce((a, b) => Math.max(a, b), -Infinity);
const formatNumber = v => v === null ? "–" : Number(v.toPrecision(4)).toString();

function addAlpha(hex, alpha) {
  const [r, g, b] = [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
  return `rgba(${r},${g},${b},${alpha})`;
}

function createLayout(extra) {
  const axis = {
    gridcolor: cssVariable("--grid"), linecolor: cssVariable("--line"), zeroline: false, automargin: true, tickfont: {size: 11},
    title: {font: {size: 12}, standoff: 8}, showline: true, ticks: "", exponentformat: "power",
  };
  const layout = {
    margin: {l: 8, r: 10, t: 8, b: 8}, showlegend: false, paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", dragmode: isNarrow() ? false : "zoom",
    font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: cssVariable("--ink")},
    hoverlabel: {
      bgcolor: cssVariable("--raised"), bordercolor: cssVariable("--line"), align: "left",
      font: {color: cssVariable("--ink"), size: 12},
    },
  };
  for (const [key, value] of Object.entries(extra)) {
    layout[key] = /^[xy]axis\d*$/.test(key) ? mergeAxis(axis, value) : value;
  }
  return layout;
}

function mergeAxis(base, changes) {
  const merged = {...base, ...changes};
  if (base.title && changes.title) merged.title = {...base.title, ...changes.title};
  return merged;
}

// ---------------------------------------------------------------------------------------------- curves and incidents
const INCIDENT_SYMBOLS = {lost: "triangle-down", recovered: "triangle-up", diverged: "x", failed: "square"};

function padRange(values, log) {
  const shown = keepFinite(values).filter(v => !log || v > 0);
  if (!shown.length) return undefined;
  let [low, high] = [smallest(shown), largest(shown)];
  if (log) [low, high] = [Math.log10(low), Math.log10(high)];
  const margin = log ? Math.max(.05 * (high - low), .03) : (high - low || Math.abs(high) || 1) * .04;
  return [low - margin, high + margin];
}

function chooseTicks(values, log) {
  const range = padRange(values, log);
  if (!log || !range) return {range, nticks: 7};
  const decades = range[1] - range[0];
  return {range, dtick: decades > 8 ? 2 : decades > 1.6 ? 1 : "D2", exponentformat: range[0] > -3 && range[1] < 6 ? "none" : "power"};
}

const visibleCurves = y => DATA.curves.filter(c => c.y[y] && !hidden.has(c.series));

/** Keep the points that log axes can show. */
function selectPoints(curve, state, log) {
  const {x, y, scale} = state, values = curve.y[y], xs = curve.x[x];
  const keep = [...xs.keys()].filter(i => (scale !== "log" || xs[i] > 0) && (log ? values.mean[i] > 0 : values.mean[i] != null));
  const pick = list => list && keep.map(i => list[i]);
  return {...curve, xs: pick(xs), mean: pick(values.mean), low: pick(values.low), high: pick(values.high)};
}

function shadeTrace(curve, log) {
  const low = log ? curve.low.map((v, i) => v > 0 ? v : curve.mean[i]) : [...curve.low];
  return {
    type: "scatter", mode: "lines", x: [...curve.xs, ...[...curve.xs].reverse()], y: [...curve.high, ...low.reverse()],
    fill: "toself", fillcolor: addAlpha(colourOf(curve.series), .13), line: {width: 0}, hoverinfo: "skip",
  };
}

function curveTraces(curve, state, crowded) {
  const colour = colourOf(curve.series), panel = DATA.panels[curve.setting], {x, y} = state;
  const unit = escapeHtml(DATA.shortNames[x]), label = `<b>${escapeHtml(curve.label)}</b>`;
  const about = `${label}${curve.seeds > 1 ? ` · mean of ${curve.seeds} seeds` : ""}${curve.status ? ` · ${escapeHtml(curve.status)}` : ""}`;
  const traces = [{
    type: "scatter", mode: curve.xs.length < 2 ? "markers" : "lines", x: curve.xs, y: curve.mean, opacity: crowded ? .65 : 1,
    line: {color: colour, dash: dashOf(curve.series), width: crowded ? 1.2 : 2}, marker: {color: colour, size: 8},
    hovertemplate: `${about}<br>%{x:.4~g} ${unit}<br>%{y:.4~g}<extra></extra>`,
  }];
  if (curve.failed && curve.xs.length) traces.push({
    type: "scatter", mode: "markers", x: curve.xs.slice(-1), y: curve.mean.slice(-1), hoverinfo: "skip",
    marker: {symbol: "x", size: 9, color: colour, line: {width: 1, color: cssVariable("--page")}},
  });
  if (curve.reached && panel.target[0] === y && (state.scale !== "log" || curve.reached[x] > 0)) traces.push({
    type: "scatter", mode: "markers", x: [curve.reached[x]], y: [curve.reached.y],
    marker: {symbol: "circle", size: crowded ? 5 : 9, color: cssVariable("--page"), line: {width: 2, color: colour}},
    hovertemplate: `${label}<br>reached ${escapeHtml(panel.target.join(" = "))}<br>at %{x:.4~g} ${unit}<extra></extra>`,
  });
  return traces;
}

/** A slope to compare with: (1 - rho)^t, what averaging alone would leave of the largest error. */
function averagingTrace(curves, gap, logX) {
  const errors = keepFinite(curves.flatMap(c => c.mean)), rounds = curves.flatMap(c => c.xs);
  if (!errors.length) return {type: "scatter", x: [], y: []};
  const top = largest(errors), first = smallest(rounds);
  const end = Math.min(largest(rounds), first + Math.log(smallest(errors) / top) / Math.log(Math.max(1 - gap, 1e-9)));
  const xs = Array.from({length: 60}, (_, i) => first + (end - first) * i / 59).filter(v => !logX || v > 0);
  return {
    type: "scatter", mode: "lines", x: xs, y: xs.map(t => top * (1 - gap) ** (t - first)), name: "rate",
    line: {color: cssVariable("--quiet"), width: 1.6, dash: "dashdot"},
    hovertemplate: `(1 − ρ)<sup>t</sup>, ρ = ${formatNumber(gap)}<extra></extra>`,
  };
}

function incidentTrace(incidents, x) {
  return {
    type: "scatter", mode: "markers", x: incidents.map(i => i.x[x]), y: incidents.map(() => 0), yaxis: "y2",
    marker: {symbol: incidents.map(i => INCIDENT_SYMBOLS[i.kind]), size: 9, color: incidents.map(i => colourOf(i.series))},
    text: incidents.map(i => `<b>${escapeHtml(i.kind)}</b> · ${escapeHtml(i.run)}<br>${escapeHtml(i.text).slice(0, 160)}`),
    hovertemplate: "%{text}<extra></extra>",
  };
}

function curvePanel(setting, state, log) {
  const {x, y} = state, logX = state.scale === "log", panel = DATA.panels[setting];
  const crowded = DATA.curves.filter(c => c.setting === setting).length > MANY_CURVES;
  const comparable = visibleCurves(y).filter(c => DATA.panels[c.setting].task === panel.task);      // share their axes
  const curves = comparable.filter(c => c.setting === setting).map(c => selectPoints(c, state, log));
  const incidents = DATA.incidents.filter(i => i.setting === setting && !hidden.has(i.series));
  const hasStrip = incidents.length > 0;
  const data = [
    ...curves.filter(c => c.low && !crowded).map(c => shadeTrace(c, log)),
    ...curves.flatMap(c => curveTraces(c, state, crowded)),
  ];
  if (log && x === "round" && panel.gap) data.push(averagingTrace(curves, panel.gap, logX));
  if (hasStrip) data.push(incidentTrace(incidents, x));
  const shapes = panel.target[0] !== y ? [] : [{
    type: "line", xref: "paper", x0: 0, x1: 1, y0: panel.target[1], y1: panel.target[1],
    line: {color: cssVariable("--quiet"), width: 1, dash: "dot"},
  }];
  const layout = createLayout({
    shapes,
    xaxis: {
      title: {text: DATA.axisTitles[x]}, type: logX ? "log" : "linear", anchor: hasStrip ? "y2" : "y",
      ...chooseTicks(comparable.flatMap(c => c.x[x]), logX),
    },
    yaxis: {
      title: {text: DATA.axisTitles[y]}, type: log ? "log" : "linear", domain: [hasStrip ? .09 : 0, 1],
      ...chooseTicks(comparable.flatMap(c => {
        const isShown = (_, i) => !logX || c.x[x][i] > 0, {mean, low = [], high = []} = c.y[y];
        return (crowded ? [mean] : [mean, low, high]).flatMap(list => list.filter(isShown));
      }), log),
    },
  });
  if (hasStrip) layout.yaxis2 = {domain: [0, .07], range: [-1, 1], showticklabels: false, showgrid: false, zeroline: false, fixedrange: true};
  return {data, layout};
}

// --------------------------------------------------------------------------------------------------- other charts
function sensitivityPanel(panel) {
  const xs = panel.points.map(p => p.value), log = Math.min(...xs) > 0 && Math.max(...xs) / Math.min(...xs) >= 8;
  const colour = colourOf(panel.algorithm), line = {color: colour, dash: dashOf(panel.algorithm), width: 2};
  const second = cssVariable("--quiet");
  const meanTrace = (key, axis, unit) => {
    const points = panel.points.filter(p => p[key]);
    return {
      type: "scatter", mode: "lines+markers", x: points.map(p => p.value), y: points.map(p => p[key][0]), yaxis: axis,
      ...(key === "second" ? {line: {color: second, dash: "dot", width: 2}, marker: {color: second, size: 7, symbol: "square-open"}}
        : {line, marker: {color: colour, size: 7}}),
      name: key === "mb" ? "" : panel.series[key === "second" ? 1 : 0] || "", showlegend: key !== "mb",
      error_y: {
        type: "data", symmetric: false, color: key === "second" ? second : colour, thickness: 1.2, width: 4,
        array: points.map(p => p[key][2] === null ? 0 : p[key][2] - p[key][0]),
        arrayminus: points.map(p => p[key][1] === null ? 0 : p[key][0] - p[key][1]),
      },
      customdata: points.map(p => `${p.runs} runs, ${p.reached} reached ${escapeHtml(panel.target)}${p.failed ? `, ${p.failed} diverged or failed` : ""}`),
      hovertemplate: `${escapeHtml(panel.key)} = %{x}<br>%{y:.4~g} ${escapeHtml(unit)}<br>%{customdata}<extra></extra>`,
    };
  };
  const data = [
    {
      type: "scatter", mode: "markers", x: panel.points.flatMap(p => p.finals.map(() => p.value)), y: panel.points.flatMap(p => p.finals),
      marker: {color: addAlpha(colour, .35), size: 6}, hoverinfo: "skip", showlegend: false,
    },
    ...(panel.series.length ? [meanTrace("second", "y", panel.metric)] : []),
    meanTrace("final", "y", panel.metric), meanTrace("mb", "y2", "MB"),
  ];
  const annotations = panel.points.filter(p => p.reached < p.runs).map(p => ({
    x: log ? Math.log10(p.value) : p.value, y: 0, yref: "y2 domain", yanchor: "bottom", showarrow: false,
    text: p.reached ? `${p.reached} of ${p.runs}` : "not<br>reached", font: {size: 10, color: cssVariable("--warn")},
  }));
  return {data, layout: createLayout({
    annotations, showlegend: panel.series.length > 0, legend: {orientation: "h", y: 1.02, yanchor: "bottom"},
    xaxis: {title: {text: panel.title.split(",")[0]}, type: log ? "log" : "linear", anchor: "y2", tickvals: xs, ticktext: xs.map(String)},
    yaxis: {title: {text: panel.metric}, domain: [.54, 1]},
    yaxis2: {title: {text: "MB to target"}, domain: [0, .44], rangemode: "tozero"},
  })};
}

/** Colours of groups: the algorithm's own, or a scale where variants of one algorithm are compared. */
function groupColours(algorithms) {
  const isUnique = new Set(algorithms).size === algorithms.length;
  return algorithms.map((name, i) => isUnique ? colourOf(name) : DATA.scales[algorithms.length][i]);
}

function replayPanel(panel) {
  const colours = groupColours(panel.groups.map(group => group.algorithm)), count = panel.groups.length;
  const data = panel.groups.map((group, k) => {
    const found = [...group.times.keys()].filter(i => group.times[i]);
    return {
      type: "scatter", mode: "markers", x: found.map(i => i + .6 * (k + .5) / count - .3), y: found.map(i => group.times[i][0]),
      marker: {color: colours[k], size: 9}, name: group.label, customdata: found.map(i => panel.networks[i]),
      error_y: {
        type: "data", symmetric: false, color: colours[k], thickness: 1.2, width: 3,
        array: found.map(i => group.times[i][2] === null ? 0 : group.times[i][2] - group.times[i][0]),
        arrayminus: found.map(i => group.times[i][1] === null ? 0 : group.times[i][0] - group.times[i][1]),
      },
      hovertemplate: `<b>${escapeHtml(group.label)}</b> · %{customdata}<br>%{y:.4~g} s<extra></extra>`,
    };
  });
  return {data, layout: createLayout({
    showlegend: true, legend: {orientation: "h", y: 1.02, yanchor: "bottom"},
    xaxis: {tickvals: [...panel.networks.keys()], ticktext: panel.networks, range: [-.5, panel.networks.length - .5]},
    yaxis: {title: {text: "seconds"}, type: "log"},
  })};
}

function winnersPanel(panel) {
  const {map} = panel, colours = groupColours(map.algorithms), last = Math.max(map.labels.length - 1, 1);
  const text = map.winners.map((row, i) => row.map((_, j) => map.labels
    .map((label, k) => [map.seconds[k][i][j], label]).sort((a, b) => a[0] - b[0])
    .map(([seconds, label]) => `${escapeHtml(label)}: ${formatNumber(seconds)} s`).join("<br>")));
  const shown = new Set(map.winners.flat());
  const legend = map.labels.map((label, k) => ({
    type: "scatter", mode: "markers", x: [null], y: [null], name: label, showlegend: shown.has(k),
    marker: {symbol: "square", size: 11, color: colours[k]},
  }));
  return {data: [{
    type: "heatmap", x: map.latencies.map(String), y: map.bandwidths.map(String), z: map.winners, zmin: 0, zmax: last,
    colorscale: map.labels.length > 1 ? colours.map((c, k) => [k / last, c]) : [[0, colours[0]], [1, colours[0]]],
    showscale: false, xgap: 1, ygap: 1, text, hovertemplate: "%{x} ms, %{y} Mbit/s<br>%{text}<extra></extra>",
  }, ...legend], layout: createLayout({
    showlegend: true, legend: {orientation: "h", y: 1.02, yanchor: "bottom"},
    xaxis: {title: {text: "latency (ms, one way)"}, type: "category", showgrid: false},
    yaxis: {title: {text: "uplink (Mbit/s)"}, type: "category", showgrid: false},
  })};
}

function barsPanel(source, rows, unit) {
  const bars = DATA[source], colours = DATA.scales[bars.names.length], shown = rows.filter(i => !hidden.has(bars.series[i]));
  const totals = shown.map(i => bars.names.reduce((sum, name) => sum + (bars.values[name][i] || 0), 0));
  const data = bars.names.map((name, k) => ({
    type: "bar", orientation: "h", name, y: shown.map((_, n) => n), x: shown.map(i => bars.values[name][i]), width: .42,
    marker: {color: colours[k], line: {color: cssVariable(isDark() ? "--quiet" : "--page"), width: .5}}, text: shown.map(() => escapeHtml(name)),
    textposition: "inside", insidetextanchor: "middle", textangle: 0, textfont: {size: 10.5}, constraintext: "inside",
    customdata: shown.map(i => escapeHtml(bars.labels[i])),
    hovertemplate: `<b>%{customdata}</b><br>${escapeHtml(name)}: %{x:.4~g} ${escapeHtml(unit)}<extra></extra>`,
  }));
  const annotations = shown.map((i, n) => ({
    x: 0, y: n - .42, xanchor: "left", yanchor: "middle", showarrow: false, xshift: -2,
    text: `<b>${escapeHtml(bars.labels[i])}</b>  ${formatNumber(totals[n])}`, font: {size: 11.5, color: cssVariable("--ink")},
  }));
  return {data, height: 46 * shown.length + 60, layout: createLayout({
    barmode: "stack", annotations, bargap: .2, uniformtext: {mode: "hide", minsize: 9},
    xaxis: {title: {text: unit}, rangemode: "tozero", nticks: 7},
    yaxis: {range: [shown.length - .45, -.75], showticklabels: false, showgrid: false, showline: false, fixedrange: true},
  })};
}

/** One colour range for all runs. The lowest tenth is cut off: the first rounds, when no node has learnt anything. */
function accuracyRange() {
  const values = keepFinite(DATA.heatmaps.flatMap(run => run.accuracy.flat())).sort((a, b) => a - b);
  const low = values[Math.floor(values.length * .1)];
  return [low, Math.max(values[values.length - 1], low + 1e-6)];
}

function heatmapPanel(run) {
  const [zmin, zmax] = accuracyRange(), shown = run.nodes.length;
  return {data: [{
    type: "heatmap", x: run.rounds, y: run.nodes.map(String), z: run.accuracy, colorscale: "Cividis", zmin, zmax,
    colorbar: {thickness: 10, outlinewidth: 0, title: {text: isNarrow() ? "" : "accuracy", side: "right"}},
    hovertemplate: "node %{y}, round %{x}<br>accuracy %{z:.3f}<extra></extra>",
  }], layout: createLayout({
    xaxis: {title: {text: "round"}, showgrid: false, nticks: 8},
    yaxis: {title: {text: shown < run.node_count ? `node (${shown} of ${run.node_count})` : "node"}, type: "category", autorange: "reversed", showgrid: false, nticks: 12},
  })};
}

// ---------------------------------------------------------------------------------------------------------- topology
/** Links in six widths: plotly has one width per trace. */
function linkTraces(run, layout, carried) {
  const {xy: [xs, ys], edges} = layout, bins = 6;
  const most = Math.max(...run.bytes[run.bytes.length - 1].map(v => 2 * (v || 0)), 1);
  return Array.from({length: bins}, (_, bin) => {
    const links = edges.filter((_, k) => Math.min(bins - 1, Math.floor(carried[k] / most * bins)) === bin), share = (bin + 1) / bins;
    return {
      type: "scatter", mode: "lines", hoverinfo: "skip", line: {width: .8 + 4 * share, color: addAlpha(isDark() ? "#8FA3B8" : "#5B6B7C", .25 + .6 * share)},
      x: links.flatMap(([i, j]) => [xs[i], xs[j], null]), y: links.flatMap(([i, j]) => [ys[i], ys[j], null]),
    };
  });
}

/** Invisible points in the middle of the links, to hover over. */
function linkLabelTrace(layout, carried) {
  const {xy: [xs, ys], edges} = layout;
  return {
    type: "scatter", mode: "markers", marker: {size: 14, color: "rgba(0,0,0,0)"},
    x: edges.map(([i, j]) => (xs[i] + xs[j]) / 2), y: edges.map(([i, j]) => (ys[i] + ys[j]) / 2),
    text: edges.map(([i, j], k) => `link ${i} – ${j}<br>${formatNumber(carried[k] / 1e6)} MB so far`), hovertemplate: "%{text}<extra></extra>",
  };
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(low); power <= high; power++) {
    for (const factor of high - low > 2 ? [1] : [1, 2, 5]) {
      const at = power + Math.log10(factor);
      if (at >= low && at <= high) ticks.push([at, `${factor === 1 ? "" : `${factor}·`}10<sup>${power}</sup>`]);
    }
  }
  return {tickvals: ticks.map(tick => tick[0]), ticktext: ticks.map(tick => tick[1])};
}

function nodeTrace(run, layout, step) {
  const [xs, ys] = layout.xy, distance = run.distance[step], sent = run.bytes[step], hasLabels = xs.length <= 40;
  const positive = keepFinite(run.distance.flat()).filter(v => v > 0);
  const low = Math.log10(positive.length ? smallest(positive) : 1e-3);
  const high = Math.max(Math.log10(positive.length ? largest(positive) : 1), low + .5);
  return {
    type: "scatter", mode: hasLabels ? "markers+text" : "markers", x: xs, y: ys, text: xs.map((_, i) => String(i)),
    textfont: {size: 11, color: distance.map(v => v > 0 && (Math.log10(v) - low) / (high - low) > .55 ? "#111" : "#fff")},
    marker: {
      size: hasLabels ? 30 : Math.max(7, 260 / Math.sqrt(xs.length) / 1.6), color: distance.map(v => v > 0 ? Math.log10(v) : low),
      colorscale: "Cividis", cmin: low, cmax: high, line: {width: 1.5, color: cssVariable(isDark() ? "--quiet" : "--page")},
      colorbar: {
        thickness: 10, outlinewidth: 0, ...logTicks(low, high),
        title: {text: isNarrow() ? "" : "distance of x to the mean", side: "right"},
      },
    },
    customdata: xs.map((_, i) => `node ${i}<br>distance to the mean ${formatNumber(distance[i])}<br>${formatNumber((sent[i] || 0) / 1e6)} MB broadcast`),
    hovertemplate: "%{customdata}<extra></extra>",
  };
}

function graphPanel(run, step) {
  const layout = DATA.graphs.layouts[run.layout], sent = run.bytes[step];
  const carried = layout.edges.map(([i, j]) => (sent[i] || 0) + (sent[j] || 0));
  const blank = {visible: false, range: [-1.25, 1.25], fixedrange: true};
  return {
    data: [...linkTraces(run, layout, carried), linkLabelTrace(layout, carried), nodeTrace(run, layout, step)],
    layout: createLayout({
      xaxis: {...blank}, yaxis: {...blank, scaleanchor: "x"},
      annotations: layout.gap ? [{
        text: `spectral gap ρ = ${formatNumber(layout.gap)}`, xref: "paper", yref: "paper", x: 0, y: 1, xanchor: "left",
        yanchor: "top", showarrow: false, font: {size: 12, color: cssVariable("--quiet")},
      }] : [],
    }),
  };
}
