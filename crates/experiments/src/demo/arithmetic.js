"use strict";
// The model of the demo: a Llama with exchangeable attention, in float64, for one short text.
//
// It computes the same as the native engine: a test runs this file and the engine on the same models and texts and compares
// every weight, output and probability. Unsupported parts are rejected by name.
const Termwise = (() => {
  const MAX_ORDER = 150;
  const RMS_EPS = 1.1920929e-7;
  const FLOOR = 1e-12;
  /** Keys of variant strings that the demo does not support. */
  const ELSEWHERE = ["dim", "in", "out", "post"];

  // ---- Parsing of variant strings ----------------------------------------------------------------------------------------------------------

  const fail = (message) => { throw new Error(message); };
  const number = (what, text) => {
    const value = Number(text);
    return text.trim() !== "" && Number.isFinite(value) ? value : fail(`“${what}” takes a number, found “${text}”`);
  };
  const count = (what, text, least) => {
    const value = Number(text);
    return /^\d+$/.test(text) && value >= least ? value : fail(`“${what}” takes a whole number from ${least} on, found “${text}”`);
  };

  /** Words, separated by spaces or +, parentheses kept whole. */
  function split(text) {
    const words = [];
    let depth = 0, word = "";
    for (const c of text) {
      if ("({".includes(c)) depth++;
      if (")}".includes(c)) depth--;
      if (depth < 0) fail("unmatched closing parenthesis");
      if (depth === 0 && /[\s+]/.test(c)) {
        if (word) words.push(word);
        word = "";
      } else word += c;
    }
    if (depth > 0) fail("unmatched opening parenthesis");
    if (word) words.push(word);
    return words;
  }

  /** `taylor=0..4`, `taylor(0..4)` and `taylor{0..4}` are the same. */
  function headAndValue(word) {
    const open = word.search(/[({]/), equal = word.indexOf("=");
    if (open >= 0 && (equal < 0 || open < equal)) {
      if (!/[)}]$/.test(word)) fail(`“${word}” has characters after its parenthesis`);
      return [word.slice(0, open), word.slice(open + 1, -1)];
    }
    return equal < 0 ? [word, null] : [word.slice(0, equal), word.slice(equal + 1)];
  }

  function orders(text) {
    const list = new Set();
    for (const item of text.split(",").map((item) => item.trim()).filter(Boolean)) {
      if (item.startsWith("coef=")) {
        if (item !== "coef=1") fail(`the demo supports only Taylor coefficients; remove “${item}”`);
        continue;
      }
      const [first, last] = item.includes("..") ? item.split("..") : [item, item];
      const from = count("taylor", first, 0), to = count("taylor", last.replace(/^=/, ""), 0);
      if (from > to) fail(`the range “${item}” is descending`);
      if (to > MAX_ORDER) fail(`order ${to} exceeds ${MAX_ORDER}`);
      for (let n = from; n <= to; n++) list.add(n);
    }
    if (!list.size) fail("“taylor” needs at least one order, as in “taylor=0..4”");
    return { kind: "taylor", orders: [...list].sort((a, b) => a - b) };
  }

  const MAPS = ["identity", "elu", "relu", "l2"];
  function kernel(head, value) {
    switch (head) {
      case "exp": return value === null ? { kind: "exp" } : fail("“exp” takes no argument");
      case "taylor": return orders(value ?? "");
      case "power": return { kind: "power", p: Math.min(count("power", value ?? "", 0), MAX_ORDER) };
      case "feature":
        if (value === "hedgehog") fail("“feature=hedgehog” needs weights that the models of this demo do not have");
        return MAPS.includes(value) ? { kind: "feature", map: value } : fail(`“feature” takes one of ${MAPS.join(", ")}, found “${value}”`);
      default: return null;
    }
  }

  const plain = () => ({ kernel: { kind: "exp" }, clamp: null, scale: null, cap: null });

  /** Parses one word; returns false if it is unknown. */
  function weigh(to, head, value) {
    const own = kernel(head, value);
    if (own) to.kernel = own;
    else if (["clamp", "scale", "cap"].includes(head)) to[head] = value === "off" ? null : number(head, value ?? "");
    else return false;
    return true;
  }

  function parse(text, presets, variant) {
    const seen = new Set();
    for (const word of split(text)) {
      const [head, value] = headAndValue(word);
      const key = head === "denominator" ? "over" : head;
      if (value === null && presets[head] !== undefined) {
        if (seen.size) fail(`“${head}” is a preset and comes first`);
        parse(presets[head], {}, variant);
        seen.add("preset");
        continue;
      }
      const slot = ["exp", "taylor", "power", "feature"].includes(key) ? "kernel" : key;
      if (seen.has(slot)) fail(`“${word}” sets the same part twice`);
      seen.add(slot);
      if (ELSEWHERE.includes(key)) {
        if (value === "off") continue;
        fail(`the demo does not support “${key}”`);
      }
      if (weigh(variant, key, value)) continue;
      const [first, ...rest] = (value ?? "").split(",");
      const nothing = () => rest.length && fail(`“${key}=${first}” takes no further arguments here, found “${rest.join(",")}”`);
      switch (key) {
        case "window": case "sinks": variant[key] = value === "off" ? null : count(key, value ?? "", 1); break;
        case "far": {
          if (value === "off") { variant.far = null; break; }
          const far = plain();
          let kernels = 0;
          for (const inner of split(value ?? "")) {
            const [head, value] = headAndValue(inner);
            kernels += kernel(head, value) ? 1 : 0;
            if (!weigh(far, head, value)) fail(`“far” takes a kernel, clamp, scale and cap here, found “${inner}”`);
          }
          if (kernels !== 1) fail("“far” needs one kernel in its parentheses, as in “far(taylor=0..2)”");
          variant.far = far;
          break;
        }
        case "write": {
          if (value === "off") { variant.write = null; break; }
          if (first !== "delta") fail(`“write” takes “delta”, found “${first}”`);
          variant.write = { range: 1, scale: 1 };
          for (const option of rest) {
            if (option.startsWith("scale=")) variant.write.scale = number("scale", option.slice(6));
            else variant.write.range = number("write=delta", option);
          }
          if (!(variant.write.range > 0 && variant.write.range <= 2)) fail("the upper bound of β must be above 0 and at most 2");
          break;
        }
        case "over": {
          if (first === "sum") {
            const sum = { kind: "sum", floor: null, eps: null };
            for (const option of rest) {
              if (option.startsWith("floor=")) sum.floor = number("floor", option.slice(6));
              else if (option.startsWith("eps=")) sum.eps = number("eps", option.slice(4));
              // It affects only gradients.
              else if (option !== "detached") fail(`“over=sum” takes floor, eps and detached here, found “${option}”`);
            }
            variant.over = sum;
          } else if (["length", "none"].includes(first)) { nothing(); variant.over = { kind: first }; }
          else fail(`“over” takes sum, length or none here, found “${first}”`);
          break;
        }
        case "decay":
          nothing();
          if (value === "off") variant.decay = null;
          else if (["fixed", "softplus"].includes(first)) variant.decay = first;
          else fail(`“decay” takes fixed or softplus here, found “${first}”`);
          break;
        case "qk_norm":
          nothing();
          if (!["l2", "off"].includes(first)) fail(`“qk_norm” takes l2 here, found “${first}”`);
          variant.qk_norm = first === "off" ? null : first;
          break;
        case "norm":
          nothing();
          if (!["none", "l2", "scaled_l2", "rms"].includes(first)) fail(`“norm” takes l2, scaled_l2 or rms here, found “${first}”`);
          variant.norm = first;
          break;
        case "rope":
          if (!["on", "off"].includes(value)) fail(`“rope” is on or off, found “${value}”`);
          variant.rope = value === "on";
          break;
        case "conv": variant.conv = value === "off" ? null : count("conv", value ?? "", 1); break;
        default: fail(`“${word}” is not part of a variant string: try “taylor=0..4”, “window=8” or “decay=fixed”`);
      }
    }
    return variant;
  }

  /** Parses a variant string; throws an error message if it is invalid. */
  function read(text, presets = {}) {
    const variant = parse(text, presets, {
      ...plain(), window: null, sinks: null, far: null, write: null, over: { kind: "sum", floor: null, eps: null }, decay: null,
      qk_norm: null, norm: "none", rope: true, conv: null,
    });
    if (variant.sinks !== null && variant.window === null) fail("with “sinks” alone a position would not see itself; add “window=8”");
    if (variant.far && variant.window === null) fail("without a window no key is far; add “window=8”");
    if (variant.write) {
      if (variant.over.kind === "sum") fail("the write rule stores differences of values, whose weights have no sum; write “over=none”");
      if (variant.window !== null) fail("the write rule reads all earlier keys; remove the window");
    }
    return variant;
  }

  // ---- Kernels --------------------------------------------------------------------------------------------------------------------------

  /** w(x) of all kernels except exp, whose rows are shifted. */
  function weight(kernel, x) {
    switch (kernel.kind) {
      case "exp": return Math.exp(x);
      case "power": return x ** kernel.p;
      case "feature": return x;
      default: {
        const last = kernel.orders[kernel.orders.length - 1];
        // A long series at a negative score loses all digits to cancellation, and equals exp to float64 precision.
        if (x < 0 && kernel.orders.length === last + 1 && last > 8 * -x + 30) return Math.exp(x);
        let term = 1, sum = 0, next = 0;
        for (let n = 0; n <= last; n++) {
          if (n > 0) term *= x / n;
          if (kernel.orders[next] === n) { sum += term; next++; }
        }
        return sum;
      }
    }
  }

  const features = {
    identity: (x) => x,
    elu: (x) => x.map((x) => (x > 0 ? x + 1 : Math.exp(x))),
    relu: (x) => x.map((x) => Math.max(x, 0)),
    l2: (x) => unit(x),
  };
  const mapOf = (kernel) => features[kernel.kind === "feature" ? kernel.map : "identity"];

  // ---- The model ------------------------------------------------------------------------------------------------------------------------

  const dot = (a, b) => {
    let sum = 0;
    for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
    return sum;
  };
  const unit = (x, floor = FLOOR) => {
    const inverse = 1 / Math.max(Math.sqrt(dot(x, x)), floor);
    return x.map((x) => x * inverse);
  };
  const sigmoid = (x) => 1 / (1 + Math.exp(-x));
  const softplus = (x) => (x > 0 ? x + Math.log1p(Math.exp(-x)) : Math.log1p(Math.exp(x)));

  /** Tensors as float32 numbers, by name, from base64 of little-endian bytes. */
  function load(model) {
    const tensors = {};
    for (const [name, { shape, data }] of Object.entries(model.tensors)) {
      const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
      tensors[name] = { shape, values: Float64Array.from(new Float32Array(bytes.buffer)) };
    }
    return { ...model, tensors };
  }

  /** Rows of h, each times Wᵀ, plus b. */
  function linear(model, rows, name) {
    const { shape: [outputs, inputs], values } = model.tensors[`${name}.weight`];
    const bias = model.tensors[`${name}.bias`]?.values;
    return rows.map((row) => {
      const out = new Array(outputs);
      for (let o = 0; o < outputs; o++) {
        let sum = bias ? bias[o] : 0;
        for (let i = 0; i < inputs; i++) sum += values[o * inputs + i] * row[i];
        out[o] = sum;
      }
      return out;
    });
  }

  function rmsnorm(model, rows, name) {
    const weight = model.tensors[`${name}.weight`].values;
    return rows.map((row) => {
      const inverse = 1 / Math.sqrt(dot(row, row) / row.length + model.config.norm_eps);
      return row.map((x, i) => x * inverse * weight[i]);
    });
  }

  /** silu of a causal filter, one for each channel. */
  function convolve(model, rows, name, width) {
    const { values } = model.tensors[name];
    return rows.map((row, t) => row.map((_, channel) => {
      let sum = 0;
      for (let j = Math.max(width - 1 - t, 0); j < width; j++) sum += values[channel * width + j] * rows[t + j + 1 - width][channel];
      return sum * sigmoid(sum);
    }));
  }

  function rotate(x, t, theta) {
    const half = x.length / 2, out = x.slice();
    for (let i = 0; i < half; i++) {
      const angle = t * theta ** (-2 * i / x.length), cos = Math.cos(angle), sin = Math.sin(angle);
      out[i] = x[i] * cos - x[i + half] * sin;
      out[i + half] = x[i + half] * cos + x[i] * sin;
    }
    return out;
  }

  /** The weights that a variant needs and this model does not have; empty if there are none. */
  function missing(model, variant) {
    const has = (name) => model.tensors[`model.layers.0.self_attn.${name}`];
    const taps = has("q_conv1d.weight")?.shape[2] ?? null;
    if (variant.conv !== null && variant.conv !== taps) return `conv=${variant.conv}`;
    if (variant.write && !has("beta_proj.weight")) return "write=delta";
    if (variant.decay === "softplus" && !has("decay_gate_proj.weight")) return "decay=softplus";
    if (variant.norm === "rms" && !has("out_norm.weight")) return "norm=rms";
    return "";
  }

  /** One head: weights [T][T] of v before the norm, y, and the inputs of its memory. */
  function attend(q, k, v, variant, { head, decay, beta, normWeight }) {
    const T = q.length, d = q[0].length, e = v[0].length;
    const near = variant, far = variant.far;
    const isNear = (t, s) => variant.window === null || t - s < variant.window || (variant.sinks !== null && s < variant.sinks);
    const scaleOf = (scoreFn) => scoreFn.scale ?? 1 / Math.sqrt(d);
    const mapped = (scoreFn) => ({ q: q.map(mapOf(scoreFn.kernel)), k: k.map(mapOf(scoreFn.kernel)) });
    const rows = { near: mapped(near), far: far && mapped(far) };
    const step = Math.log1p(-(2 ** (-5 - head)));
    let sum = 0;
    const c = q.map((_, t) => {
      if (variant.decay === "fixed") sum += step;
      if (variant.decay === "softplus") sum -= softplus(decay[t]);
      return sum;
    });
    const score = (scoreFn, q, k) => {
      let x = scaleOf(scoreFn) * dot(q, k);
      if (scoreFn.cap !== null) x = scoreFn.cap * Math.tanh(x / scoreFn.cap);
      return scoreFn.clamp === null ? x : Math.min(x, scoreFn.clamp);
    };
    const scaleFree = variant.norm !== "none";
    const shifts = (variant.over.kind === "sum" || scaleFree) && [near, far].some((scoreFn) => scoreFn?.kernel.kind === "exp");

    // The written values as sums of values: u = C·v.
    const written = [];
    for (let t = 0; t < T; t++) {
      const row = new Array(T).fill(0);
      row[t] = 1;
      if (variant.write) {
        for (let s = 0; s < t; s++) {
          const w = Math.exp(c[t] - c[s]) * weight(near.kernel, variant.write.scale * dot(rows.near.k[t], rows.near.k[s]));
          for (let r = 0; r <= s; r++) row[r] -= w * written[s][r];
        }
        const b = variant.write.range * sigmoid(beta[t]);
        for (let r = 0; r <= t; r++) row[r] *= b;
      }
      written.push(row);
    }

    const scores = [], weights = [], y = [];
    for (let t = 0; t < T; t++) {
      const seen = [];
      for (let s = 0; s <= t; s++) {
        const scoreFn = isNear(t, s) ? near : far;
        if (!scoreFn) continue;
        const { q: qs, k: ks } = scoreFn === near ? rows.near : rows.far;
        seen.push({ s, x: score(scoreFn, qs[t], ks[s]), log: c[t] - c[s], kernel: scoreFn.kernel });
      }
      const size = ({ x, log, kernel }) => (kernel.kind === "exp" ? x + log : log);
      const rho = shifts ? Math.max(...seen.map(size)) : 0;
      const w = new Array(T).fill(0);
      for (const { s, x, log, kernel } of seen) {
        w[s] = kernel.kind === "exp" ? Math.exp(x + log - rho) : weight(kernel, x) * Math.exp(log - rho);
      }
      const z = w.reduce((a, b) => a + b, 0), small = Math.exp(-rho);
      let D = 1;
      if (variant.over.kind === "length") D = seen.length;
      if (variant.over.kind === "sum") {
        D = variant.over.floor === null ? z : Math.max(z, variant.over.floor * small);
        if (variant.over.eps !== null) D += variant.over.eps * small;
      }
      const row = new Array(T).fill(0);
      for (let s = 0; s <= t; s++) for (let r = 0; r <= s; r++) row[r] += w[s] / D * written[s][r];
      let out = new Array(e).fill(0);
      for (let s = 0; s <= t; s++) for (let i = 0; i < e; i++) out[i] += row[s] * v[s][i];
      const scale = shifts && variant.over.kind !== "sum" ? small : 1;
      if (variant.norm === "l2") out = unit(out, FLOOR * scale);
      if (variant.norm === "scaled_l2") out = unit(out, FLOOR * scale).map((x) => x * e);
      if (variant.norm === "rms") {
        const inverse = 1 / Math.sqrt(dot(out, out) / e + RMS_EPS * scale * scale);
        out = out.map((x, i) => x * inverse * normWeight[i]);
      }
      scores.push(w.map((_, s) => seen.find((key) => key.s === s)?.x ?? null));
      weights.push(row);
      y.push(out);
    }
    const u = written.map((row) => v[0].map((_, i) => row.reduce((sum, x, s) => sum + (x ? x * v[s][i] : 0), 0)));
    return { q, k, v, u, c, scores, weights, y };
  }

  /** Runs a loaded model on token ids: probabilities after each position, and every head. */
  function run(model, ids, variant) {
    const { config, tensors } = model;
    const lack = missing(model, variant);
    if (lack) fail(`this model has no weights for “${lack}”`);
    const { hidden, heads, kv_heads: kvHeads, head_dim: d } = config;
    let x = ids.map((id) => Array.from(tensors["model.embed_tokens.weight"].values.subarray(id * hidden, (id + 1) * hidden)));
    const layers = [];
    for (let l = 0; l < config.layers; l++) {
      const at = `model.layers.${l}`, own = `${at}.self_attn`;
      const h = rmsnorm(model, x, `${at}.input_layernorm`);
      const projected = ["q", "k", "v"].map((name) => {
        const rows = linear(model, h, `${own}.${name}_proj`);
        return variant.conv === null ? rows : convolve(model, rows, `${own}.${name}_conv1d.weight`, variant.conv);
      });
      const decay = variant.decay === "softplus" && linear(model, h, `${own}.decay_gate_proj`);
      const beta = variant.write && linear(model, h, `${own}.beta_proj`);
      const normWeight = tensors[`${own}.out_norm.weight`]?.values;
      const prepared = (row, t, head) => {
        let part = row.slice(head * d, (head + 1) * d);
        if (variant.qk_norm === "l2") part = unit(part);
        return variant.rope ? rotate(part, t, config.rope_theta) : part;
      };
      const list = [];
      for (let head = 0; head < heads; head++) {
        const kv = Math.floor(head / (heads / kvHeads));
        const q = projected[0].map((row, t) => prepared(row, t, head)), k = projected[1].map((row, t) => prepared(row, t, kv));
        const v = projected[2].map((row) => row.slice(kv * d, (kv + 1) * d));
        const column = (rows, i) => rows && rows.map((row) => row[i]);
        list.push(attend(q, k, v, variant, { head, decay: column(decay, head), beta: column(beta, kv), normWeight }));
      }
      layers.push(list);
      const joined = ids.map((_, t) => list.flatMap((head) => head.y[t]));
      const add = (rows) => { x = x.map((row, t) => row.map((x, i) => x + rows[t][i])); };
      add(linear(model, joined, `${own}.o_proj`));
      const m = rmsnorm(model, x, `${at}.post_attention_layernorm`);
      const gate = linear(model, m, `${at}.mlp.gate_proj`), up = linear(model, m, `${at}.mlp.up_proj`);
      add(linear(model, gate.map((row, t) => row.map((g, i) => g * sigmoid(g) * up[t][i])), `${at}.mlp.down_proj`));
    }
    const last = rmsnorm(model, x, "model.norm");
    const logits = linear(model, last, tensors["lm_head.weight"] ? "lm_head" : "model.embed_tokens");
    const probabilities = logits.map((row) => {
      const most = Math.max(...row), weights = row.map((x) => Math.exp(x - most)), sum = weights.reduce((a, b) => a + b, 0);
      return weights.map((w) => w / sum);
    });
    return { layers, probabilities };
  }

  // ---- The memory -----------------------------------------------------------------------------------------------------------------------

  /** Multi-indices of degree n over d coordinates, as ascending lists of coordinates. */
  function monomials(d, n) {
    let list = [[]];
    for (let i = 0; i < n; i++) {
      list = list.flatMap((term) => Array.from({ length: d - (term.at(-1) ?? 0) }, (_, j) => [...term, (term.at(-1) ?? 0) + j]));
    }
    return list;
  }
  const product = (x, term) => term.reduce((value, i) => value * x[i], 1);

  /**
   * The recurrent network of order n after position t: for each monomial k^α of degree n the sum over keys of M·k^α·u, and of M·k^α.
   * Keys are those that `remembers(s)` says.
   */
  function memory(head, n, t, remembers = () => true) {
    const terms = monomials(head.k[0].length, n), e = head.u[0].length;
    const matrix = terms.map(() => new Array(e).fill(0)), sums = terms.map(() => 0);
    for (let s = 0; s <= t; s++) {
      if (!remembers(s)) continue;
      const decay = Math.exp(head.c[t] - head.c[s]);
      terms.forEach((term, row) => {
        const value = decay * product(head.k[s], term);
        sums[row] += value;
        for (let i = 0; i < e; i++) matrix[row][i] += value * head.u[s][i];
      });
    }
    return { order: n, terms, matrix, sums };
  }

  /** What the query at t reads from a memory of order n: its share of Σ_s w·u and of Σ_s w. */
  function recall(head, { order, terms, matrix, sums }, t, scale) {
    const u = new Array(head.u[0].length).fill(0);
    let z = 0;
    terms.forEach((term, row) => {
      const counts = {};
      term.forEach((i) => { counts[i] = (counts[i] ?? 0) + 1; });
      const factorial = (n) => (n < 2 ? 1 : n * factorial(n - 1));
      const factor = scale ** order * product(head.q[t], term) / Object.values(counts).reduce((f, n) => f * factorial(n), 1);
      z += factor * sums[row];
      matrix[row].forEach((x, i) => { u[i] += factor * x; });
    });
    return { u, z };
  }

  return { read, load, missing, run, memory, recall, monomials };
})();
if (typeof module !== "undefined") module.exports = Termwise;
