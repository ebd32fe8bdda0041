//! States in a safetensors file, layer by layer.
//!
//! Metadata, in the order of their keys: `format` = `termwise state 1`, `layers`, and for layer i
//!
//! | key | value |
//! |---|---|
//! | `layer.i.heads` | the variants, one per line |
//! | `layer.i.memory` | `natural` or `cache` |
//! | `layer.i.shape` | `batch heads kv_heads d e` |
//! | `layer.i.positions` | one per batch row |
//! | `layer.i.rope` | if a head rotates: the factor of q and k, then the rotary frequencies. Files of earlier versions without it are rejected. |
//!
//! Tensors below `layer.i.row.b.unit.u.`, for batch row b and state group u:
//!
//! | name | value |
//! |---|---|
//! | `key_norm` [1] | the largest norm of a key |
//! | `h` [N, e], `z` [N] | a recurrent state; rows of H in the order of [`crate::Basis`] |
//! | `keys` [n, d], `values` [n, e] | a cache, in the order of positions; keys for near queries, then for far queries |
//! | `head.j.weights`, `head.j.decay` [n] | per key, if the j-th head of the group has them |
//! | `far.h`, `far.z` | the recurrent state of far keys |
//! | `codes.c.keys`, `.values`, `.key_scales`, `.value_scales` | block c of a quantized cache, as bytes |
//! | `received` | the accumulated attention per slot, with heavy hitters |
//!
//! The cache of a window whose heads have no data per key is in the order of its slots. `layer.i.carry.*` are the running sums of gates and decays
//! and the last inputs of the short convolution. All values are float32, running sums float64.
//!
//! Loading restores the saved state bit for bit, and equal states give equal bytes. Files are written atomically, so an
//! interrupted save does not change an earlier file. Every size is checked against the variants, and caches grow only by rows that the file contains.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use safetensors::{Dtype, SafeTensorError, SafeTensors, View};
use termwise_base::files::{self, with_metadata, write_whole};

use crate::state::kv_cache::KvCache;
use crate::state::memory::{GroupMemory, State};
use crate::state::ring::RingKvCache;
use crate::{Error, Layer, Rope, Shape, StateKind, Variant};

const FORMAT: &str = "termwise state 1";

/// Positions up to here are exact in float64, as RoPE needs them.
const MAX_POSITION: usize = 1 << 53;

/// Values to be written to a file.
enum Values<'a> {
    /// Rows, of which the first values are written.
    Rows(&'a [f32], usize, usize),
    /// The keys of a cache, as rows.
    Keys(&'a KvCache),
    /// The keys or the values of these slots of a ring, in float32.
    KeysOfRing(&'a RingKvCache, Vec<usize>),
    RowsOfRing(&'a RingKvCache, Vec<usize>),
    Codes(&'a [u8]),
    /// bfloat16
    Scales(&'a [u16]),
    Narrow(Vec<f32>),
    Wide(Cow<'a, [f64]>),
}

struct FileTensor<'a> {
    shape: Vec<usize>,
    values: Values<'a>,
}

impl View for FileTensor<'_> {
    fn dtype(&self) -> Dtype {
        match self.values {
            Values::Wide(_) => Dtype::F64,
            Values::Codes(_) => Dtype::U8,
            Values::Scales(_) => Dtype::BF16,
            _ => Dtype::F32,
        }
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        let mut bytes = Vec::with_capacity(self.data_len());
        match &self.values {
            Values::Rows(values, padded, used) => {
                values.chunks_exact(*padded).flat_map(|row| &row[..*used]).for_each(|x| bytes.extend(x.to_le_bytes()));
            }
            Values::Keys(cache) => {
                let mut key = vec![0.0; cache.d];
                for s in 0..cache.len {
                    cache.key(s, &mut key);
                    key.iter().for_each(|x| bytes.extend(x.to_le_bytes()));
                }
            }
            Values::KeysOfRing(ring, slots) => {
                let mut key = vec![0.0f32; ring.d];
                for &slot in slots {
                    ring.key(slot, &mut key);
                    key.iter().for_each(|x| bytes.extend(x.to_le_bytes()));
                }
            }
            Values::RowsOfRing(ring, slots) => {
                let mut value = vec![0.0f32; ring.ep];
                for &slot in slots {
                    ring.value(slot, &mut value);
                    value[..ring.e].iter().for_each(|x| bytes.extend(x.to_le_bytes()));
                }
            }
            Values::Narrow(values) => values.iter().for_each(|x| bytes.extend(x.to_le_bytes())),
            Values::Codes(codes) => bytes.extend_from_slice(codes),
            Values::Scales(scales) => scales.iter().for_each(|x| bytes.extend(x.to_le_bytes())),
            Values::Wide(values) => values.iter().for_each(|x| bytes.extend(x.to_le_bytes())),
        }
        bytes.into()
    }
    fn data_len(&self) -> usize {
        let bytes = match self.dtype() {
            Dtype::F64 => 8,
            Dtype::U8 => 1,
            Dtype::BF16 => 2,
            _ => 4,
        };
        self.shape.iter().product::<usize>() * bytes
    }
}

impl State {
    /// Writes this state; see [`State::load`].
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        State::save_layers(std::slice::from_ref(self), path)
    }

    /// Writes the states of the layers of a model.
    pub fn save_layers(layers: &[State], path: &Path) -> Result<(), Error> {
        let bytes = State::to_bytes(layers).map_err(|error| file_error(path, error.to_string()))?;
        write_whole(path, &bytes).map_err(|error| file_error(path, error.to_string()))
    }

    /// The bytes that [`State::save_layers`] writes.
    pub fn to_bytes(layers: &[State]) -> Result<Vec<u8>, SafeTensorError> {
        let mut metadata = BTreeMap::from([("format".to_string(), FORMAT.to_string()), ("layers".to_string(), layers.len().to_string())]);
        let mut tensors = Vec::new();
        for (i, state) in layers.iter().enumerate() {
            for (key, value) in state.description() {
                metadata.insert(format!("layer.{i}.{key}"), value);
            }
            if let Some(rope) = state.layer.rope().filter(|_| state.layer.rotates()) {
                let numbers: Vec<String> = rope_numbers(rope).map(|number| number.to_string()).collect();
                metadata.insert(format!("layer.{i}.rope"), numbers.join(" "));
            }
            tensors.extend(state.tensors().into_iter().map(|(name, tensor)| (format!("layer.{i}.{name}"), tensor)));
        }
        Ok(with_metadata(&safetensors::serialize(tensors, None)?, &metadata))
    }

    /// Reads the state of B rows of this layer with this kind of memory from a file with one layer. Rejects other files.
    pub fn load(path: &Path, layer: &Layer, batch: usize, memory: StateKind) -> Result<State, Error> {
        let mut layers = State::load_layers(path, &[(layer, memory)], batch)?;
        Ok(layers.pop().expect("one layer was requested"))
    }

    /// Reads the states of B rows of the layers of a model, each with its kind of memory.
    pub fn load_layers(path: &Path, layers: &[(&Layer, StateKind)], batch: usize) -> Result<Vec<State>, Error> {
        // Not memory-mapped: a file that is truncated during the read must be an error and not terminate the process.
        let bytes = files::read(path, u64::MAX - 1).map_err(|error| unreadable(path, &error))?;
        State::from_bytes(&bytes, path, layers, batch)
    }

    /// Like [`State::load_layers`], from the bytes of a file; `path` is for messages.
    pub fn from_bytes(bytes: &[u8], path: &Path, layers: &[(&Layer, StateKind)], batch: usize) -> Result<Vec<State>, Error> {
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| unreadable(path, &error))?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let tensors = SafeTensors::deserialize(bytes).map_err(|error| unreadable(path, &error))?;
        let text = |key: &str| metadata.get(key).map_or("nothing", String::as_str);
        expect(path, "the format", FORMAT, text("format"))?;
        expect(path, "the number of layers", &layers.len().to_string(), text("layers"))?;
        let mut states = Vec::with_capacity(layers.len());
        for (i, &(layer, memory)) in layers.iter().enumerate() {
            let mut state = layer.state_with(batch, memory)?;
            for (key, asked) in state.description().into_iter().filter(|(key, _)| *key != "positions") {
                expect(path, &format!("the {key} of layer {i}"), &asked, text(&format!("layer.{i}.{key}")))?;
            }
            if layer.rotates()
                && let Some(rope) = layer.rope()
            {
                check_rope(path, i, rope, metadata.get(&format!("layer.{i}.rope")))?;
            }
            let positions = text(&format!("layer.{i}.positions"));
            let parsed: Option<Vec<usize>> = positions.split(' ').map(|position| position.parse().ok()).collect();
            match parsed.filter(|parsed| parsed.len() == batch && parsed.iter().all(|&position| position <= MAX_POSITION)) {
                Some(parsed) => state.steps.positions = parsed,
                None => return Err(file_error(path, format!("layer {i} has no {} positions, found `{positions}`", batch))),
            }
            state.fill(&LayerTensors { path, tensors: &tensors, layer: i, e: state.shape.e })?;
            states.push(state);
        }
        Ok(states)
    }

    fn description(&self) -> [(&'static str, String); 4] {
        let Shape { batch, heads, kv_heads, d, e, .. } = self.shape;
        let texts: Vec<String> = self.heads().iter().map(Variant::to_string).collect();
        let positions: Vec<String> = self.steps.positions.iter().map(usize::to_string).collect();
        let memory = match self.memory {
            StateKind::Auto => "natural",
            StateKind::Cache => "cache",
        };
        [
            ("shape", format!("{batch} {heads} {kv_heads} {d} {e}")),
            ("heads", texts.join("\n")),
            ("memory", memory.to_string()),
            ("positions", positions.join(" ")),
        ]
    }

    fn tensors(&self) -> Vec<(String, FileTensor<'_>)> {
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: &[usize], values| tensors.push((name, FileTensor { shape: shape.to_vec(), values }));
        let flat = |values| Values::Rows(values, 1, 1);
        let e = self.shape.e;
        for (index, state) in self.groups.iter().enumerate() {
            let name = group_name(index, self.bases.len());
            add(format!("{name}.key_norm"), &[1], flat(std::slice::from_ref(&state.key_norm)));
            match &state.memory {
                GroupMemory::Recurrent { h, z } => {
                    let ep = e.next_multiple_of(termwise_kernels::PAD);
                    add(format!("{name}.h"), &[h.len() / ep, e], Values::Rows(h, ep, e));
                    if !z.is_empty() {
                        add(format!("{name}.z"), &[z.len()], flat(z));
                    }
                }
                GroupMemory::Cache(cache) => {
                    add(format!("{name}.keys"), &[cache.len, cache.d], Values::Keys(cache));
                    add(format!("{name}.values"), &[cache.len, e], Values::Rows(&cache.values[..cache.len * cache.ep], cache.ep, e));
                    for (j, per_key) in cache.per_key.iter().enumerate() {
                        if !per_key.weights.is_empty() {
                            add(format!("{name}.head.{j}.weights"), &[cache.len], flat(&per_key.weights));
                        }
                        if !per_key.log_decay.is_empty() {
                            add(format!("{name}.head.{j}.decay"), &[cache.len], Values::Wide(per_key.log_decay.as_slice().into()));
                        }
                    }
                }
                GroupMemory::Ring(ring) => {
                    let slots: Vec<usize> = match ring.layout.plain {
                        true => (0..ring.float_len(ring.next)).collect(),
                        false => ring.layout.positions(ring.next).map(|position| ring.layout.slot(position)).collect(),
                    };
                    let len = slots.len();
                    for (j, per_key) in ring.per_key.iter().enumerate() {
                        if !per_key.weights.is_empty() {
                            let weights = slots.iter().map(|&slot| per_key.weights[slot]).collect();
                            add(format!("{name}.head.{j}.weights"), &[len], Values::Narrow(weights));
                        }
                        if !per_key.log_decay.is_empty() {
                            let log_decay: Vec<f64> = slots.iter().map(|&slot| per_key.log_decay[slot]).collect();
                            add(format!("{name}.head.{j}.decay"), &[len], Values::Wide(log_decay.into()));
                        }
                    }
                    add(format!("{name}.keys"), &[len, ring.d], Values::KeysOfRing(ring, slots.clone()));
                    add(format!("{name}.values"), &[len, e], Values::RowsOfRing(ring, slots));
                    for (i, block) in ring.code_blocks().enumerate() {
                        add(format!("{name}.codes.{i}.keys"), &[block.keys.len()], Values::Codes(&block.keys));
                        add(format!("{name}.codes.{i}.values"), &[block.values.len()], Values::Codes(&block.values));
                        add(format!("{name}.codes.{i}.key_scales"), &[block.key_scales.len()], Values::Scales(&block.key_scales));
                        add(format!("{name}.codes.{i}.value_scales"), &[block.value_scales.len()], Values::Scales(&block.value_scales));
                    }
                    if ring.layout.heavy_hitters.is_some() {
                        add(format!("{name}.received"), &[ring.len()], flat(&ring.accumulated_attention[..ring.len()]));
                    }
                }
            }
        }
        for (index, state) in self.groups.iter().enumerate() {
            let (name, ep) = (group_name(index, self.bases.len()), e.next_multiple_of(termwise_kernels::PAD));
            if let Some(far) = state.far.as_ref().filter(|far| !far.h.is_empty()) {
                add(format!("{name}.far.h"), &[far.h.len() / ep, e], Values::Rows(&far.h, ep, e));
                if !far.z.is_empty() {
                    add(format!("{name}.far.z"), &[far.z.len()], flat(&far.z));
                }
            }
        }
        for ((tail, word), [_, dim]) in self.steps.tails.iter().zip(["q", "k", "v"]).zip(self.shape.rows_of_heads()) {
            if !tail.is_empty() {
                let rows = (0..tail.len()).map(|at| tail[tail_index(at, dim, self.steps.width)]).collect();
                add(format!("carry.tail.{word}"), &[tail.len()], Values::Narrow(rows));
            }
        }
        let steps = &self.steps;
        for (word, sums) in [
            ("in_gate", &steps.in_gate),
            ("out_gate", &steps.out_gate),
            ("post_gate", &steps.post_gate),
            ("decay", &steps.decay),
            ("log_decay", &steps.log_decay),
        ] {
            add(format!("carry.{word}"), &[sums.len()], Values::Wide(sums.as_slice().into()));
        }
        add("carry.scores".into(), &[steps.scores.len()], flat(&steps.scores));
        tensors
    }

    /// Reads all tensors of a file; positions are already set.
    fn fill(&mut self, source: &LayerTensors) -> Result<(), Error> {
        let (e, groups) = (self.shape.e, self.bases.len());
        let plan = self.layer.state_plan(self.memory);
        for (index, state) in self.groups.iter_mut().enumerate() {
            let name = group_name(index, groups);
            source.narrow(&format!("{name}.key_norm"), &[1], |_, x| state.key_norm = x)?;
            if let Some(far) = state.far.as_mut().filter(|far| !far.h.is_empty()) {
                let ep = e.next_multiple_of(termwise_kernels::PAD);
                source.narrow(&format!("{name}.far.h"), &[far.h.len() / ep, e], |i, x| far.h[i / e * ep + i % e] = x)?;
                if !far.z.is_empty() {
                    source.narrow(&format!("{name}.far.z"), &[far.z.len()], |i, x| far.z[i] = x)?;
                }
            }
            let heads: Vec<&Variant> = plan.groups[index % groups].heads.iter().map(|&head| &self.layer.heads()[head]).collect();
            match &mut state.memory {
                GroupMemory::Recurrent { h, z } => {
                    let ep = e.next_multiple_of(termwise_kernels::PAD);
                    source.narrow(&format!("{name}.h"), &[h.len() / ep, e], |i, x| h[i / e * ep + i % e] = x)?;
                    if !z.is_empty() {
                        source.narrow(&format!("{name}.z"), &[z.len()], |i, x| z[i] = x)?;
                    }
                }
                GroupMemory::Ring(ring) => source.ring(&name, ring, self.steps.positions[index / groups], &heads)?,
                GroupMemory::Cache(cache) => source.cache(&name, cache, self.steps.positions[index / groups], &heads)?,
            }
        }
        let width = self.steps.width;
        for ((tail, word), [_, dim]) in self.steps.tails.iter_mut().zip(["q", "k", "v"]).zip(self.shape.rows_of_heads()) {
            if !tail.is_empty() {
                source.narrow(&format!("carry.tail.{word}"), &[tail.len()], |at, x| tail[tail_index(at, dim, width)] = x)?;
            }
        }
        let steps = &mut self.steps;
        for (word, sums) in [
            ("in_gate", &mut steps.in_gate),
            ("out_gate", &mut steps.out_gate),
            ("post_gate", &mut steps.post_gate),
            ("decay", &mut steps.decay),
            ("log_decay", &mut steps.log_decay),
        ] {
            source.wide(&format!("carry.{word}"), sums.len(), |i, x| sums[i] = x)?;
        }
        let scores = &mut steps.scores;
        source.narrow("carry.scores", &[scores.len()], |i, x| scores[i] = x)
    }
}

/// Files store the last inputs of the short convolution as [B, channels, w − 1], states as [B, heads, w − 1, dimension]: the index in a state of an
/// index in a file.
fn tail_index(at: usize, dim: usize, width: usize) -> usize {
    let (kept, size) = (width - 1, dim * (width - 1));
    let (head, channel, t) = (at / size, at % size / kept, at % kept);
    head * size + t * dim + channel
}

fn group_name(index: usize, groups: usize) -> String {
    format!("row.{}.unit.{}", index / groups, index % groups)
}

fn file_error(path: &Path, problem: String) -> Error {
    Error::File { path: path.display().to_string(), problem }
}

fn unreadable(path: &Path, error: &dyn std::fmt::Display) -> Error {
    file_error(path, format!("not a valid state file: {error}"))
}

/// The factor of q and k, then the frequencies.
fn rope_numbers(rope: &Rope) -> impl Iterator<Item = f64> {
    std::iter::once(rope.factor()).chain(rope.frequencies().iter().copied())
}

/// Rejects keys that were rotated by other angles.
fn check_rope(path: &Path, layer: usize, rope: &Rope, saved: Option<&String>) -> Result<(), Error> {
    let Some(saved) = saved else {
        let problem = format!("it has no rotary frequencies of layer {layer}, like files of earlier versions: save the state again");
        return Err(file_error(path, problem));
    };
    let found: Vec<f64> = saved.split(' ').map(|number| number.parse().unwrap_or(f64::NAN)).collect();
    let asked: Vec<f64> = rope_numbers(rope).collect();
    // Powers differ in their last bits between math libraries.
    let same = |(found, asked): (&f64, &f64)| (found - asked).abs() <= 1e-12 * asked.abs();
    if found.len() == asked.len() && found.iter().zip(&asked).all(same) {
        return Ok(());
    }
    let problem = match found.iter().zip(&asked).position(|pair| !same(pair)) {
        Some(0) => format!("rotated queries and keys of layer {layer} are multiplied by {}, expected {}", found[0], asked[0]),
        Some(i) => {
            format!("rotary frequency {} of layer {layer} is {}, expected {}", i - 1, found[i], asked[i])
        }
        None => format!("layer {layer} has {} rotary frequencies, expected {}", found.len() - 1, asked.len() - 1),
    };
    Err(file_error(path, format!("{problem}: load it with the RoPE theta and scaling with which it was saved")))
}

fn expect(path: &Path, what: &str, asked: &str, found: &str) -> Result<(), Error> {
    if asked == found {
        return Ok(());
    }
    let short = |text: &str| {
        let mut lines: Vec<&str> = text.lines().collect();
        lines.dedup();
        lines.join("` | `")
    };
    Err(file_error(
        path,
        format!("{what} is `{}`, expected `{}`: load it with the layers from which it was saved", short(found), short(asked)),
    ))
}

/// One layer of a file.
struct LayerTensors<'a> {
    path: &'a Path,
    tensors: &'a SafeTensors<'a>,
    layer: usize,
    /// Number of values of a row of v.
    e: usize,
}

impl LayerTensors<'_> {
    /// The bytes of a tensor of this type and shape.
    fn bytes(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&[u8], Error> {
        let name = format!("layer.{}.{name}", self.layer);
        let asked = format!("{dtype:?} {shape:?}");
        match self.tensors.tensor(&name) {
            Ok(view) if view.dtype() == dtype && view.shape() == shape => Ok(view.data()),
            Ok(view) => Err(file_error(self.path, format!("`{name}` is {:?} {:?}, expected {asked}", view.dtype(), view.shape()))),
            Err(_) => Err(file_error(self.path, format!("`{name}`, {asked}, is missing"))),
        }
    }

    /// The rows of a tensor.
    fn rows(&self, name: &str) -> Option<usize> {
        self.tensors.tensor(&format!("layer.{}.{name}", self.layer)).ok()?.shape().first().copied()
    }

    /// A cache of all keys before position `next`.
    fn cache(&self, name: &str, cache: &mut KvCache, next: usize, heads: &[&Variant]) -> Result<(), Error> {
        let (keys, values) = (self.matrix(&format!("{name}.keys"), [next, cache.d])?, self.values(name, next)?);
        cache.reserve(next)?;
        keys.chunks_exact(cache.d).zip(values.chunks_exact(self.e)).for_each(|(key, value)| cache.push(key, value));
        self.per_key(name, next, heads, |head, row, weight, log_decay| cache.per_key[head].set(row, weight, log_decay))
    }

    /// A windowed cache at position `next`.
    fn ring(&self, name: &str, ring: &mut RingKvCache, next: usize, heads: &[&Variant]) -> Result<(), Error> {
        let (keys_name, layout) = (format!("{name}.keys"), ring.layout);
        let len = if layout.plain { ring.float_len(next) } else { self.rows(&keys_name).unwrap_or(0) };
        let Some(skipped) = (if layout.plain { Some(0) } else { ring.skipped_positions(len, next) }) else {
            let problem = format!("`{keys_name}` has {len} rows, which cannot be the keys of a window at position {next}");
            return Err(file_error(self.path, problem));
        };
        // Rows are in the order of slots, or of positions; the latter may be more than the window.
        let slot = |row: usize| {
            let position = if row < layout.distance.sinks { row } else { row + skipped };
            let is_kept = row < layout.distance.sinks || next - position <= layout.distance.window;
            if layout.plain { Some(row) } else { is_kept.then(|| layout.slot(position)) }
        };
        let (keys, values) = (self.matrix(&keys_name, [len, ring.d])?, self.values(name, len)?);
        ring.resume(next)?;
        for (row, (key, value)) in keys.chunks_exact(ring.d).zip(values.chunks_exact(self.e)).enumerate() {
            if let Some(slot) = slot(row) {
                ring.write(slot, key, value);
            }
        }
        self.per_key(name, len, heads, |head, row, weight, log_decay| {
            if let Some(slot) = slot(row) {
                ring.per_key[head].set(slot, weight, log_decay);
            }
        })?;
        for (i, block) in ring.code_blocks_mut().enumerate() {
            for (codes, word) in [(&mut block.keys, "keys"), (&mut block.values, "values")] {
                let len = codes.len();
                codes.copy_from_slice(self.bytes(&format!("{name}.codes.{i}.{word}"), Dtype::U8, &[len])?);
            }
            for (scales, word) in [(&mut block.key_scales, "key_scales"), (&mut block.value_scales, "value_scales")] {
                let bytes = self.bytes(&format!("{name}.codes.{i}.{word}"), Dtype::BF16, &[scales.len()])?;
                scales.iter_mut().zip(bytes.chunks_exact(2)).for_each(|(to, from)| *to = u16::from_le_bytes([from[0], from[1]]));
            }
        }
        if layout.heavy_hitters.is_some() {
            let len = ring.len();
            self.narrow(&format!("{name}.received"), &[len], |i, x| ring.accumulated_attention[i] = x)?;
        }
        Ok(())
    }

    /// Weights and log decays per key of all heads of a group that have them, row by row.
    fn per_key(
        &self,
        name: &str,
        len: usize,
        heads: &[&Variant],
        mut set: impl FnMut(usize, usize, Option<f32>, Option<f64>),
    ) -> Result<(), Error> {
        for (j, variant) in heads.iter().enumerate().filter(|_| len > 0) {
            if variant.in_gate.is_some() || variant.denominator.key_side() {
                self.narrow(&format!("{name}.head.{j}.weights"), &[len], |row, x| set(j, row, Some(x), None))?;
            }
            if variant.decays_by_head() {
                self.wide(&format!("{name}.head.{j}.decay"), len, |row, x| set(j, row, None, Some(x)))?;
            }
        }
        Ok(())
    }

    fn values(&self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        self.matrix(&format!("{name}.values"), [len, self.e])
    }

    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Vec<f32>, Error> {
        let mut values = Vec::new();
        self.narrow(name, &shape, |_, x| values.push(x))?;
        Ok(values)
    }

    fn narrow(&self, name: &str, shape: &[usize], mut take: impl FnMut(usize, f32)) -> Result<(), Error> {
        let bytes = self.bytes(name, Dtype::F32, shape)?;
        let (numbers, _) = bytes.as_chunks::<4>();
        numbers.iter().enumerate().for_each(|(i, x)| take(i, f32::from_le_bytes(*x)));
        Ok(())
    }

    fn wide(&self, name: &str, len: usize, mut take: impl FnMut(usize, f64)) -> Result<(), Error> {
        let bytes = self.bytes(name, Dtype::F64, &[len])?;
        let (numbers, _) = bytes.as_chunks::<8>();
        numbers.iter().enumerate().for_each(|(i, x)| take(i, f64::from_le_bytes(*x)));
        Ok(())
    }
}
