//! States in a safetensors file, one layer after the other.
//!
//! Metadata: `format` = `termwise state 1`, `layers`, and for layer i `layer.i.heads` (the variants, one per line), `layer.i.memory`
//! (`natural` or `cache`), `layer.i.shape` (`batch heads kv_heads d e`), `layer.i.positions` (one per batch row) and, where a head rotates,
//! `layer.i.rope` (the factor of q and k, then the rotary frequencies). Files of earlier versions without `rope` are refused for such layers.
//! Tensors below `layer.i.`, row b, state group u: `row.b.unit.u.h` [N, e] and `.z` [N], or `.keys` [positions, d] and `.values` [positions, e] with
//! `.head.j.weights` and `.head.j.decay` [positions] where the j-th head of the group has them; `.far.h` and `.far.z` of far keys beside them, keys then with those
//! of far queries behind; `.mean.sum` (float64) of keys whose mean is followed; `row.b.unit.u.key_norm` [1]; and what else passes from token to token,
//! `carry.*`. The keys of a window are in the order of their places (see the pool), codes as bytes `.codes.i.keys` and so on, `.received` of keys that are chosen by it.
//! float32, but running sums float64. Rows of H are in the order of [`crate::Basis`].
//!
//! What is loaded is bit for bit what was saved. A file is written beside its place and then moved there, so that an interrupted
//! save leaves an earlier file as it was. Nothing in a file is trusted: every size must be the one that the variants ask for, and caches grow only
//! by rows that the file really holds.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use safetensors::{Dtype, SafeTensorError, SafeTensors, View};
use termwise_base::files::{self, write_whole};

use crate::state::cache::Cache;
use crate::state::memory::{GroupMemory, State};
use crate::state::pool::Pool;
use crate::{Error, Layer, Memory, Rope, Shape, Variant};

const FORMAT: &str = "termwise state 1";

/// Positions up to here are exact in float64, as RoPE needs them.
const MAX_POSITION: usize = 1 << 53;

/// Values on their way into a file.
enum Values<'a> {
    /// Rows of which the first so many values count.
    Rows(&'a [f32], usize, usize),
    /// The keys of a cache, as rows.
    Keys(&'a Cache),
    /// The keys or the values of a pool that are float32, as rows in the order of places.
    PoolKeys(&'a Pool),
    PoolRows(&'a Pool),
    Codes(&'a [u8]),
    /// low and step of the codes of values.
    Scales(&'a [[f32; 2]]),
    Wide(&'a [f64]),
}

struct Tensor<'a> {
    shape: Vec<usize>,
    values: Values<'a>,
}

impl View for Tensor<'_> {
    fn dtype(&self) -> Dtype {
        match self.values {
            Values::Wide(_) => Dtype::F64,
            Values::Codes(_) => Dtype::U8,
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
            Values::PoolKeys(pool) => {
                let mut key = vec![0.0f32; pool.d];
                for place in 0..pool.float_len() {
                    pool.key(place, None, &mut key);
                    key.iter().for_each(|x| bytes.extend(x.to_le_bytes()));
                }
            }
            Values::PoolRows(pool) => {
                let mut value = vec![0.0f32; pool.ep];
                for place in 0..pool.float_len() {
                    pool.value(place, &mut value);
                    value[..pool.e].iter().for_each(|x| bytes.extend(x.to_le_bytes()));
                }
            }
            Values::Codes(codes) => bytes.extend_from_slice(codes),
            Values::Scales(scales) => scales.iter().flatten().for_each(|x| bytes.extend(x.to_le_bytes())),
            Values::Wide(values) => values.iter().for_each(|x| bytes.extend(x.to_le_bytes())),
        }
        bytes.into()
    }
    fn data_len(&self) -> usize {
        let bytes = match self.dtype() {
            Dtype::F64 => 8,
            Dtype::U8 => 1,
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

    /// What [`State::save_layers`] writes.
    pub fn to_bytes(layers: &[State]) -> Result<Vec<u8>, SafeTensorError> {
        let mut metadata = HashMap::from([("format".to_string(), FORMAT.to_string()), ("layers".to_string(), layers.len().to_string())]);
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
        safetensors::serialize(tensors, Some(metadata))
    }

    /// The state of B rows of this layer with this kind of memory, from a file with one layer. Refuses files of anything else.
    pub fn load(path: &Path, layer: &Layer, batch: usize, memory: Memory) -> Result<State, Error> {
        let mut layers = State::load_layers(path, &[(layer, memory)], batch)?;
        Ok(layers.pop().expect("one layer was asked for"))
    }

    /// The states of B rows of the layers of a model, each with its kind of memory.
    pub fn load_layers(path: &Path, layers: &[(&Layer, Memory)], batch: usize) -> Result<Vec<State>, Error> {
        // Not mapped: a file that is cut while it is read must be an error, and not the end of the process.
        let bytes = files::read(path, u64::MAX - 1).map_err(|error| unreadable(path, &error))?;
        State::from_bytes(&bytes, path, layers, batch)
    }

    /// As [`State::load_layers`], of the bytes of a file; `path` is for messages.
    pub fn from_bytes(bytes: &[u8], path: &Path, layers: &[(&Layer, Memory)], batch: usize) -> Result<Vec<State>, Error> {
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
            state.fill(&Source { path, tensors: &tensors, layer: i })?;
            states.push(state);
        }
        Ok(states)
    }

    fn description(&self) -> [(&'static str, String); 4] {
        let Shape { batch, heads, kv_heads, d, e, .. } = self.shape;
        let texts: Vec<String> = self.heads().iter().map(Variant::to_string).collect();
        let positions: Vec<String> = self.steps.positions.iter().map(usize::to_string).collect();
        let memory = match self.memory {
            Memory::Natural => "natural",
            Memory::Cache => "cache",
        };
        [
            ("shape", format!("{batch} {heads} {kv_heads} {d} {e}")),
            ("heads", texts.join("\n")),
            ("memory", memory.to_string()),
            ("positions", positions.join(" ")),
        ]
    }

    fn tensors(&self) -> Vec<(String, Tensor<'_>)> {
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: &[usize], values| tensors.push((name, Tensor { shape: shape.to_vec(), values }));
        let flat = |values| Values::Rows(values, 1, 1);
        let e = self.shape.e;
        for (index, store) in self.stores.iter().enumerate() {
            let name = group_name(index, self.bases.len());
            add(format!("{name}.key_norm"), &[1], flat(std::slice::from_ref(&store.key_norm)));
            match &store.memory {
                GroupMemory::Moments { h, z } => {
                    let ep = e.next_multiple_of(crate::kernels::PAD);
                    add(format!("{name}.h"), &[h.len() / ep, e], Values::Rows(h, ep, e));
                    if !z.is_empty() {
                        add(format!("{name}.z"), &[z.len()], flat(z));
                    }
                }
                GroupMemory::Cache(cache) => {
                    add(format!("{name}.keys"), &[cache.len, cache.d], Values::Keys(cache));
                    add(format!("{name}.values"), &[cache.len, e], Values::Rows(&cache.values[..cache.len * cache.ep], cache.ep, e));
                    for (j, column) in cache.columns.iter().enumerate() {
                        if !column.weights.is_empty() {
                            add(format!("{name}.head.{j}.weights"), &[cache.len], flat(&column.weights));
                        }
                        if !column.decay.is_empty() {
                            add(format!("{name}.head.{j}.decay"), &[cache.len], Values::Wide(&column.decay));
                        }
                    }
                }
                GroupMemory::Pool(pool) => {
                    add(format!("{name}.keys"), &[pool.float_len(), pool.d], Values::PoolKeys(pool));
                    add(format!("{name}.values"), &[pool.float_len(), e], Values::PoolRows(pool));
                    for (i, (keys, values, scales)) in pool.code_parts().enumerate() {
                        add(format!("{name}.codes.{i}.keys"), &[keys.len()], Values::Codes(keys));
                        add(format!("{name}.codes.{i}.values"), &[values.len()], Values::Codes(values));
                        add(format!("{name}.codes.{i}.scales"), &[scales.len(), 2], Values::Scales(scales));
                    }
                    if pool.places.chosen.is_some() {
                        add(format!("{name}.received"), &[pool.len()], flat(&pool.received[..pool.len()]));
                    }
                }
            }
        }
        for (index, store) in self.stores.iter().enumerate() {
            let (name, ep) = (group_name(index, self.bases.len()), e.next_multiple_of(crate::kernels::PAD));
            if let Some(far) = store.far.as_ref().filter(|far| !far.h.is_empty()) {
                add(format!("{name}.far.h"), &[far.h.len() / ep, e], Values::Rows(&far.h, ep, e));
                if !far.z.is_empty() {
                    add(format!("{name}.far.z"), &[far.z.len()], flat(&far.z));
                }
            }
        }
        for (tail, word) in self.steps.tails.iter().zip(["q", "k", "v"]).filter(|(tail, _)| !tail.is_empty()) {
            add(format!("carry.tail.{word}"), &[tail.len()], flat(tail));
        }
        let steps = &self.steps;
        for (word, sums) in [
            ("in_gate", &steps.in_gate),
            ("out_gate", &steps.out_gate),
            ("post_gate", &steps.post_gate),
            ("decay", &steps.decay),
            ("log_decay", &steps.log_decay),
        ] {
            add(format!("carry.{word}"), &[sums.len()], Values::Wide(sums));
        }
        add("carry.scores".into(), &[steps.scores.len()], flat(&steps.scores));
        tensors
    }

    /// Takes all tensors of a file in; positions are known already.
    fn fill(&mut self, source: &Source) -> Result<(), Error> {
        let (e, groups) = (self.shape.e, self.bases.len());
        let plan = self.layer.state_plan(self.memory);
        for (index, store) in self.stores.iter_mut().enumerate() {
            let name = group_name(index, groups);
            source.narrow(&format!("{name}.key_norm"), &[1], |_, x| store.key_norm = x)?;
            if let Some(far) = store.far.as_mut().filter(|far| !far.h.is_empty()) {
                let ep = e.next_multiple_of(crate::kernels::PAD);
                source.narrow(&format!("{name}.far.h"), &[far.h.len() / ep, e], |i, x| far.h[i / e * ep + i % e] = x)?;
                if !far.z.is_empty() {
                    source.narrow(&format!("{name}.far.z"), &[far.z.len()], |i, x| far.z[i] = x)?;
                }
            }
            match &mut store.memory {
                GroupMemory::Moments { h, z } => {
                    let ep = e.next_multiple_of(crate::kernels::PAD);
                    source.narrow(&format!("{name}.h"), &[h.len() / ep, e], |i, x| h[i / e * ep + i % e] = x)?;
                    if !z.is_empty() {
                        source.narrow(&format!("{name}.z"), &[z.len()], |i, x| z[i] = x)?;
                    }
                }
                GroupMemory::Pool(pool) => {
                    pool.resume(self.steps.positions[index / groups], |floats, d| {
                        let (mut keys, mut values) = (Vec::new(), Vec::new());
                        source.narrow(&format!("{name}.keys"), &[floats, d], |_, x| keys.push(x))?;
                        source.narrow(&format!("{name}.values"), &[floats, e], |_, x| values.push(x))?;
                        Ok((keys, values))
                    })?;
                    for (i, (keys, values, scales)) in pool.code_parts_mut().enumerate() {
                        keys.copy_from_slice(source.bytes(&format!("{name}.codes.{i}.keys"), Dtype::U8, &[keys.len()])?);
                        values.copy_from_slice(source.bytes(&format!("{name}.codes.{i}.values"), Dtype::U8, &[values.len()])?);
                        source.narrow(&format!("{name}.codes.{i}.scales"), &[scales.len(), 2], |at, x| scales[at / 2][at % 2] = x)?;
                    }
                    if pool.places.chosen.is_some() {
                        let len = pool.len();
                        source.narrow(&format!("{name}.received"), &[len], |i, x| pool.received[i] = x)?;
                    }
                }
                GroupMemory::Cache(cache) => {
                    let (d, position) = (cache.d, self.steps.positions[index / groups]);
                    let len = source.rows(&format!("{name}.keys")).filter(|&len| cache.may_hold(len, position)).unwrap_or(position);
                    let (mut keys, mut values) = (Vec::new(), Vec::new());
                    source.narrow(&format!("{name}.keys"), &[len, d], |_, x| keys.push(x))?;
                    source.narrow(&format!("{name}.values"), &[len, e], |_, x| values.push(x))?;
                    cache.reserve(len)?;
                    cache.forgotten = position - len;
                    keys.chunks_exact(d).zip(values.chunks_exact(e)).for_each(|(key, value)| cache.push(key, &[], value));
                    for (j, (column, &head)) in cache.columns.iter_mut().zip(&plan.groups[index % groups].heads).enumerate() {
                        let variant = &self.layer.heads()[head];
                        if len > 0 && (variant.in_gate.is_some() || variant.denominator.key_side()) {
                            source.narrow(&format!("{name}.head.{j}.weights"), &[len], |_, x| column.weights.push(x))?;
                        }
                        if len > 0 && variant.decays_by_head() {
                            source.wide(&format!("{name}.head.{j}.decay"), len, |_, x| column.decay.push(x))?;
                        }
                    }
                }
            }
        }
        for (tail, word) in self.steps.tails.iter_mut().zip(["q", "k", "v"]).filter(|(tail, _)| !tail.is_empty()) {
            source.narrow(&format!("carry.tail.{word}"), &[tail.len()], |i, x| tail[i] = x)?;
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

fn group_name(index: usize, groups: usize) -> String {
    format!("row.{}.unit.{}", index / groups, index % groups)
}

fn file_error(path: &Path, problem: String) -> Error {
    Error::File { path: path.display().to_string(), problem }
}

fn unreadable(path: &Path, error: &dyn std::fmt::Display) -> Error {
    file_error(path, format!("not a state that can be read: {error}"))
}

/// The factor of q and k, then the frequencies.
fn rope_numbers(rope: &Rope) -> impl Iterator<Item = f64> {
    std::iter::once(rope.factor()).chain(rope.frequencies().iter().copied())
}

/// Refuses keys that were rotated by other angles.
fn check_rope(path: &Path, layer: usize, rope: &Rope, saved: Option<&String>) -> Result<(), Error> {
    let Some(saved) = saved else {
        let problem = format!("it has no rotary frequencies of layer {layer}, as files of earlier versions: save the state again");
        return Err(file_error(path, problem));
    };
    let found: Vec<f64> = saved.split(' ').map(|number| number.parse().unwrap_or(f64::NAN)).collect();
    let asked: Vec<f64> = rope_numbers(rope).collect();
    // Powers differ in their last bits from one mathematical library to another.
    let same = |(found, asked): (&f64, &f64)| (found - asked).abs() <= 1e-12 * asked.abs();
    if found.len() == asked.len() && found.iter().zip(&asked).all(same) {
        return Ok(());
    }
    let problem = match found.iter().zip(&asked).position(|pair| !same(pair)) {
        Some(0) => format!("rotated queries and keys of layer {layer} are multiplied by {}, asked for is {}", found[0], asked[0]),
        Some(i) => {
            format!("rotary frequency {} of layer {layer} is {}, asked for is {}", i - 1, found[i], asked[i])
        }
        None => format!("layer {layer} has {} rotary frequencies, asked for are {}", found.len() - 1, asked.len() - 1),
    };
    Err(file_error(path, format!("{problem}: load it with the theta and scaling of RoPE that it was saved with")))
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
    Err(file_error(path, format!("{what} is `{}`, asked for is `{}`: load it for what it was saved from", short(found), short(asked))))
}

/// One layer of a file.
struct Source<'a> {
    path: &'a Path,
    tensors: &'a SafeTensors<'a>,
    layer: usize,
}

impl Source<'_> {
    /// The bytes of a tensor of this type and shape.
    fn bytes(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&[u8], Error> {
        let name = format!("layer.{}.{name}", self.layer);
        let asked = format!("{dtype:?} {shape:?}");
        match self.tensors.tensor(&name) {
            Ok(view) if view.dtype() == dtype && view.shape() == shape => Ok(view.data()),
            Ok(view) => Err(file_error(self.path, format!("`{name}` is {:?} {:?}, asked for is {asked}", view.dtype(), view.shape()))),
            Err(_) => Err(file_error(self.path, format!("`{name}`, {asked}, is missing"))),
        }
    }

    /// The rows of a tensor.
    fn rows(&self, name: &str) -> Option<usize> {
        self.tensors.tensor(&format!("layer.{}.{name}", self.layer)).ok()?.shape().first().copied()
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
