//! Writing weights to safetensors files.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;

use half::{bf16, f16};
use serde_json::json;
use termwise_base::files::{self, Staged};

use super::{FloatType, INDEX_FILE, SINGLE_FILE, header, unravel};
use crate::error::{Error, Result};

/// A tensor to write.
#[derive(Clone, Copy, Debug)]
pub struct NamedTensor<'a> {
    /// Its name in the file.
    pub name: &'a str,
    /// Its shape, row-major.
    pub shape: &'a [usize],
    /// Its values, row-major.
    pub data: &'a [f32],
}

/// Options of [`write`](fn@write) and [`write_file`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct WriteOptions {
    /// The type of all tensors.
    pub dtype: FloatType,
    /// The largest number of tensor bytes per file; `None` writes a single file. A larger tensor gets its own file.
    pub max_shard_bytes: Option<u64>,
    /// Metadata of the file. Other tools expect `format` to be `pt`.
    pub metadata: BTreeMap<String, String>,
}

/// Float32, a single file, format `pt`.
impl Default for WriteOptions {
    fn default() -> WriteOptions {
        WriteOptions { dtype: FloatType::F32, max_shard_bytes: None, metadata: BTreeMap::from([("format".into(), "pt".into())]) }
    }
}

setters!(WriteOptions {
    dtype: FloatType,
    max_shard_bytes: Option<u64>,
    metadata: BTreeMap<String, String>,
});

/// Writes weights into an existing directory: `model.safetensors`, or shards and their index if `max_shard_bytes` requires several files.
///
/// Tensors keep their order. All files are complete on disk before the first one is renamed to its final name, and the file that readers
/// look for first is renamed last. Earlier weights are replaced, so write a sharded checkpoint that must survive a crash into a new directory.
pub fn write<'a>(folder: impl AsRef<Path>, tensors: impl IntoIterator<Item = NamedTensor<'a>>, options: &WriteOptions) -> Result<()> {
    let folder = folder.as_ref();
    let tensors: Vec<NamedTensor> = tensors.into_iter().collect();
    check(&tensors)?;
    let shards = split(&tensors, options);
    if shards.len() <= 1 {
        return Ok(stage(&folder.join(SINGLE_FILE), &tensors, options)?.publish()?);
    }

    let name = |number: usize| format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len());
    let staged = shards.iter().enumerate().map(|(number, shard)| stage(&folder.join(name(number)), shard, options));
    let staged = staged.collect::<Result<Vec<_>>>()?;
    let places = shards.iter().enumerate().flat_map(|(number, shard)| shard.iter().map(move |tensor| (tensor.name, name(number))));
    let total: u64 = tensors.iter().map(|tensor| size(tensor, options)).sum();
    let index = json!({"metadata": {"total_size": total}, "weight_map": places.collect::<BTreeMap<_, _>>()});
    let path = folder.join(INDEX_FILE);
    let index = Staged::write(&path, |out| writeln!(out, "{index:#}").map_err(files::Error::io("write", &path)))?;
    staged.into_iter().try_for_each(Staged::publish)?;
    index.publish()?;

    // Readers prefer the single file, so one from an earlier call would hide these shards.
    let stale = folder.join(SINGLE_FILE);
    match std::fs::remove_file(&stale) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove the old file", stale)(error)),
        _ => Ok(()),
    }
}

/// Writes tensors into one file at `path`, atomically. Ignores `max_shard_bytes`.
pub fn write_file<'a>(path: impl AsRef<Path>, tensors: impl IntoIterator<Item = NamedTensor<'a>>, options: &WriteOptions) -> Result<()> {
    let tensors: Vec<NamedTensor> = tensors.into_iter().collect();
    check(&tensors)?;
    Ok(stage(path.as_ref(), &tensors, options)?.publish()?)
}

fn check(tensors: &[NamedTensor]) -> Result<()> {
    let mut names = BTreeSet::new();
    for tensor in tensors {
        let refuse = |problem| Err(Error::TensorName { name: tensor.name.into(), problem });
        if tensor.name == header::METADATA {
            return refuse("this name is reserved by the safetensors format; use another name");
        }
        if !names.insert(tensor.name) {
            return refuse("another tensor has the same name; use unique names");
        }
        let count = tensor.shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n));
        if count != Some(tensor.data.len()) {
            return Err(Error::Buffer { name: tensor.name.into(), shape: tensor.shape.to_vec(), found: tensor.data.len() });
        }
    }
    Ok(())
}

fn size(tensor: &NamedTensor, options: &WriteOptions) -> u64 {
    (tensor.data.len() * options.dtype.bytes()) as u64
}

/// Splits the tensors, in order, before each one that would make a shard too large.
fn split<'t, 'a>(tensors: &'t [NamedTensor<'a>], options: &WriteOptions) -> Vec<&'t [NamedTensor<'a>]> {
    let Some(most) = options.max_shard_bytes else { return vec![tensors] };
    let mut shards = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (i, tensor) in tensors.iter().enumerate() {
        let more = size(tensor, options);
        if i > start && bytes + more > most {
            shards.push(&tensors[start..i]);
            (start, bytes) = (i, 0);
        }
        bytes += more;
    }
    shards.push(&tensors[start..]);
    shards
}

fn stage(path: &Path, tensors: &[NamedTensor], options: &WriteOptions) -> Result<Staged> {
    let in_file = |error: Error| if matches!(error, Error::Io(_)) { error } else { error.in_file(path.display()) };
    let header = header::to_bytes(tensors.iter().map(|t| (t.name, t.shape)), options.dtype.in_header(), &options.metadata);
    let header = header.map_err(in_file)?;
    Staged::write(path, |out| {
        out.write_all(&header).map_err(Error::io("write", path))?;
        tensors.iter().try_for_each(|tensor| write_values(out, tensor, options.dtype, path).map_err(in_file))
    })
}

fn write_values(out: &mut dyn Write, tensor: &NamedTensor, dtype: FloatType, path: &Path) -> Result<()> {
    // Values per conversion buffer.
    const CHUNK_LEN: usize = 1 << 16;
    let mut bytes = Vec::with_capacity(CHUNK_LEN * dtype.bytes());
    for (chunk, values) in tensor.data.chunks(CHUNK_LEN).enumerate() {
        bytes.clear();
        for (i, &value) in values.iter().enumerate() {
            let at = || (tensor.name.to_owned(), unravel(chunk * CHUNK_LEN + i, tensor.shape));
            if !value.is_finite() {
                let (name, index) = at();
                return Err(Error::NonFinite { name, index, value: value.into() });
            }
            let fits = match dtype {
                FloatType::F32 => put(&mut bytes, value.to_le_bytes(), true),
                FloatType::F16 => put(&mut bytes, f16::from_f32(value).to_le_bytes(), f16::from_f32(value).is_finite()),
                FloatType::Bf16 => put(&mut bytes, bf16::from_f32(value).to_le_bytes(), bf16::from_f32(value).is_finite()),
            };
            if !fits {
                let (name, index) = at();
                return Err(Error::OutOfRange { name, index, value, dtype: dtype.name() });
            }
        }
        out.write_all(&bytes).map_err(Error::io("write", path))?;
    }
    Ok(())
}

fn put<const N: usize>(bytes: &mut Vec<u8>, value: [u8; N], fits: bool) -> bool {
    bytes.extend_from_slice(&value);
    fits
}
