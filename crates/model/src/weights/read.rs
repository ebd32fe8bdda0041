//! Reading weights from safetensors files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Component, Path, PathBuf};

use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::Value;
use termwise_base::files::read_at;
use termwise_base::nearest;

use super::header::{Header, TensorEntry};
use super::{INDEX_FILE, SINGLE_FILE, unravel};
use crate::architecture::LM_HEAD;
use crate::error::{Error, NAMES_LISTED, Result};
use crate::json::{self, show};
use crate::params::{ParamRole, ParamSpec};

/// The tensors of a safetensors file or of the shards of an index.
///
/// Files are not memory-mapped: if another process truncates a file, reading fails instead of crashing. Several threads can read at once.
#[derive(Debug)]
pub struct Checkpoint {
    /// The requested path, for messages.
    path: PathBuf,
    files: Vec<(PathBuf, File)>,
    tensors: BTreeMap<String, TensorLocation>,
    metadata: BTreeMap<String, String>,
}

#[derive(Debug)]
struct TensorLocation {
    file: usize,
    entry: TensorEntry,
}

/// Type and shape of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct TensorInfo<'a> {
    /// Its type.
    pub dtype: Dtype,
    /// Its shape, row-major.
    pub shape: &'a [usize],
}

impl Checkpoint {
    /// Opens a directory (its `model.safetensors`, else its `model.safetensors.index.json`), an index, or a safetensors file. Validates all
    /// headers and reads no tensor.
    pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint> {
        let path = path.as_ref();
        let (single, index) = (path.join(SINGLE_FILE), path.join(INDEX_FILE));
        let mut checkpoint = if single.is_file() {
            Self::open_single(&single)
        } else if index.is_file() {
            Self::open_index(&index)
        } else if !path.is_file() {
            Err(Error::NoWeights { path: path.into() })
        } else if path.extension().is_some_and(|extension| extension == "json") {
            Self::open_index(path)
        } else {
            Self::open_single(path)
        }?;
        // The name of the output projection in published GPT-NeoX and Pythia files.
        if !checkpoint.tensors.contains_key(LM_HEAD)
            && let Some(head) = checkpoint.tensors.remove("embed_out.weight")
        {
            checkpoint.tensors.insert(LM_HEAD.into(), head);
        }
        Ok(checkpoint)
    }

    fn open_single(path: &Path) -> Result<Checkpoint> {
        let (file, header) = open(path)?;
        let tensors = header.tensors.into_iter().map(|(name, entry)| (name, TensorLocation { file: 0, entry })).collect();
        Ok(Checkpoint { path: path.into(), files: vec![(path.into(), file)], tensors, metadata: header.metadata })
    }

    fn open_index(path: &Path) -> Result<Checkpoint> {
        let text = termwise_base::files::read_text(path).map_err(Error::io("read the index", path))?;
        let in_index = |error: Error| error.in_file(path.display());
        let shards = json::parse(&text).and_then(shards_of).map_err(in_index)?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let mut checkpoint = Checkpoint { path: path.into(), files: Vec::new(), tensors: BTreeMap::new(), metadata: BTreeMap::new() };
        for (shard, mut names) in shards {
            let place = folder.join(&shard);
            if !place.is_file() {
                return Err(in_index(Error::MissingShard { shard }));
            }
            let (file, header) = open(&place)?;
            for (name, entry) in header.tensors {
                if !names.remove(&name) {
                    return Err(in_index(Error::IndexMismatch { shard, name, holder: "shard" }));
                }
                checkpoint.tensors.insert(name, TensorLocation { file: checkpoint.files.len(), entry });
            }
            if let Some(name) = names.pop_first() {
                return Err(in_index(Error::IndexMismatch { shard, name, holder: "index" }));
            }
            checkpoint.metadata.extend(header.metadata);
            checkpoint.files.push((place, file));
        }
        Ok(checkpoint)
    }

    /// The path of the file or of the index.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The metadata of the file.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Type and shape of a tensor.
    pub fn info(&self, name: &str) -> Result<TensorInfo<'_>> {
        let TensorEntry { dtype, shape, .. } = &self.located(name)?.entry;
        Ok(TensorInfo { dtype: *dtype, shape })
    }

    /// The bytes of a tensor, little-endian, row-major.
    pub fn bytes(&self, name: &str) -> Result<Vec<u8>> {
        let located = self.located(name)?;
        // The header was validated, so the length is bounded by the file.
        let mut bytes = vec![0; located.entry.bytes.len()];
        self.read_bytes(located, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Fills `out` with the bytes of a tensor from `start`.
    fn read_bytes(&self, TensorLocation { file, entry }: &TensorLocation, start: usize, out: &mut [u8]) -> Result<()> {
        let (path, file) = &self.files[*file];
        read_at(file, (entry.bytes.start + start) as u64, out).map_err(Error::io("read", path))
    }

    /// Reads a tensor of float32, float16, bfloat16 or float64 (rounded) into `out`, which has the length of `shape`.
    /// Fails if the shape differs from that in the file, or if a value is NaN or infinite. The content of `out` is then unspecified.
    pub fn read_into(&self, name: &str, shape: &[usize], out: &mut [f32]) -> Result<()> {
        let (info, located) = (self.info(name)?, self.located(name)?);
        if info.shape != shape {
            let (name, expected, found) = (name.into(), shape.to_vec(), info.shape.to_vec());
            return Err(self.named(Error::TensorShape { name, expected, found, more: 0 }));
        }
        if Some(out.len()) != shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n)) {
            return Err(self.named(Error::Buffer { name: name.into(), shape: shape.to_vec(), found: out.len() }));
        }
        if !is_float(info.dtype) {
            return Err(self.wrong_type(name, FLOATS, info.dtype));
        }
        let width = info.dtype.bitsize() / 8;
        let mut bytes = vec![0; CHUNK_LEN.min(out.len()) * width];
        for (piece, out) in out.chunks_mut(CHUNK_LEN).enumerate() {
            let bytes = &mut bytes[..out.len() * width];
            self.read_bytes(located, piece * CHUNK_LEN * width, bytes)?;
            convert(bytes, info.dtype, out);
        }
        match out.iter().position(|value| !value.is_finite()) {
            None => Ok(()),
            Some(place) => {
                let index = unravel(place, shape);
                Err(self.named(Error::NonFinite { name: name.into(), index, value: out[place].into() }))
            }
        }
    }

    /// The shape of a tensor and its values in float32, as with [`Checkpoint::read_into`].
    pub fn read(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>)> {
        let shape = self.info(name)?.shape.to_vec();
        // The header was validated, so the size is bounded by the file.
        let mut values = vec![0.0; shape.iter().product()];
        self.read_into(name, &shape, &mut values)?;
        Ok((shape, values))
    }

    /// The shape and the values of an int64 tensor.
    pub fn read_i64(&self, name: &str) -> Result<(Vec<usize>, Vec<i64>)> {
        let info = self.info(name)?;
        if info.dtype != Dtype::I64 {
            return Err(self.wrong_type(name, "I64", info.dtype));
        }
        let bytes = self.bytes(name)?;
        let values = bytes.as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes));
        Ok((info.shape.to_vec(), values.collect()))
    }

    /// Checks that the file contains exactly these parameters, with these shapes and a float type. Buffers of old checkpoints
    /// (`rotary_emb.inv_freq`, causal masks of Pythia) are ignored, and so is an `lm_head.weight` of the shape of the embedding if the model ties both.
    pub fn check(&self, specs: &[ParamSpec]) -> Result<()> {
        self.find_differences(specs).map_err(|error| self.named(error))
    }

    fn find_differences(&self, specs: &[ParamSpec]) -> Result<()> {
        let missing: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).filter(|name| !self.tensors.contains_key(*name)).collect();
        if !missing.is_empty() {
            let hint = if missing == [LM_HEAD] {
                "if the output projection is tied to the embedding, set `tie_word_embeddings` to true in the configuration"
            } else {
                "use the configuration of these weights, including the attention variant"
            };
            return Err(Error::MissingTensors { count: missing.len(), names: first(&missing), hint });
        }
        let expected: BTreeMap<&str, &ParamSpec> = specs.iter().map(|spec| (spec.name.as_str(), spec)).collect();
        let embedding = specs.iter().find(|spec| spec.role == ParamRole::Embedding).map(|spec| &spec.shape);
        // Buffers in published files: rotary frequencies, and the causal mask of Pythia.
        let harmless = |name: &str, entry: &TensorEntry| {
            let buffers = [".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"];
            buffers.iter().any(|suffix| name.ends_with(suffix)) || (name == LM_HEAD && Some(&entry.shape) == embedding)
        };
        let unexpected = self.tensors.iter().filter(|(name, at)| !expected.contains_key(name.as_str()) && !harmless(name, &at.entry));
        let unexpected: Vec<&str> = unexpected.map(|(name, _)| name.as_str()).collect();
        if let Some(name) = unexpected.iter().find(|name| EARLIER_KV_MEMORY.iter().any(|suffix| name.ends_with(suffix))) {
            return Err(Error::EarlierKvMemory((*name).to_owned()));
        }
        if !unexpected.is_empty() {
            return Err(Error::UnexpectedTensors { count: unexpected.len(), names: first(&unexpected) });
        }
        let mut differing = specs.iter().filter(|spec| self.tensors[&spec.name].entry.shape != spec.shape);
        if let Some(ParamSpec { name, shape, .. }) = differing.next() {
            let found = self.tensors[name].entry.shape.clone();
            return Err(Error::TensorShape { name: name.clone(), expected: shape.clone(), found, more: differing.count() });
        }
        match specs.iter().map(|spec| (&spec.name, self.tensors[&spec.name].entry.dtype)).find(|(_, dtype)| !is_float(*dtype)) {
            None => Ok(()),
            Some((name, dtype)) => Err(Error::TensorType { name: name.clone(), expected: FLOATS, found: dtype.to_string() }),
        }
    }

    fn located(&self, name: &str) -> Result<&TensorLocation> {
        self.tensors.get(name).ok_or_else(|| {
            let suggestion = nearest(name, self.names()).map(str::to_owned);
            self.named(Error::NoTensor { name: name.into(), suggestion })
        })
    }

    fn wrong_type(&self, name: &str, expected: &'static str, found: Dtype) -> Error {
        self.named(Error::TensorType { name: name.into(), expected, found: found.to_string() })
    }

    fn named(&self, error: Error) -> Error {
        error.in_file(self.path.display())
    }
}

/// Ends of the names of calibrated key ranges, which conversions of earlier builds have.
const EARLIER_KV_MEMORY: [&str; 2] = [".codes.centre", ".codes.range"];
/// Values per read.
const CHUNK_LEN: usize = 1 << 18;
const FLOATS: &str = "F32, F16, BF16 or F64";

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64)
}

fn first(names: &[&str]) -> Vec<String> {
    names.iter().take(NAMES_LISTED).map(|&name| name.to_owned()).collect()
}

/// Converts the bytes of a float type to float32.
fn convert(bytes: &[u8], dtype: Dtype, out: &mut [f32]) {
    fn each<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
        for (out, &bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
            *out = value(bytes);
        }
    }
    match dtype {
        Dtype::F32 => each(bytes, out, f32::from_le_bytes),
        Dtype::F16 => each(bytes, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
        Dtype::BF16 => each(bytes, out, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        Dtype::F64 => each(bytes, out, |bytes| f64::from_le_bytes(bytes) as f32),
        _ => unreachable!("{dtype} is not a float type"),
    }
}

fn open(path: &Path) -> Result<(File, Header)> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    let length = file.metadata().map_err(Error::io("read", path))?.len();
    let header = Header::read(&file, length).map_err(|error| error.in_file(path.display()))?;
    Ok((file, header))
}

/// The shards of an index, each with its tensors.
fn shards_of(index: Value) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let missing = || Error::MissingKey { key: "weight_map".into(), expected: "an object from tensor names to shards" };
    let map = match index.get("weight_map").ok_or_else(missing)? {
        Value::Object(map) => map,
        other => {
            let expected = "an object from tensor names to shards";
            return Err(Error::KeyType { key: "weight_map".into(), expected, found: show(other) });
        }
    };
    let mut shards: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (name, shard) in map {
        let Value::String(shard) = shard else {
            return Err(Error::KeyType { key: format!("weight_map.{name}"), expected: "the name of a shard", found: show(shard) });
        };
        // A backslash is a path separator on some systems, so it is rejected on all.
        let plain = matches!(Path::new(shard).components().collect::<Vec<_>>()[..], [Component::Normal(only)] if only == shard.as_str());
        if !plain || shard.contains('\\') || shard.contains('\0') {
            return Err(Error::ShardName { shard: shard.clone() });
        }
        shards.entry(shard.clone()).or_default().insert(name.clone());
    }
    Ok(shards)
}
