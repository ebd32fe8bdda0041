//! The header of a safetensors file: eight bytes of length, then JSON with the type, shape and offsets of every tensor.
//!
//! The `safetensors` crate validates the same properties, but its errors do not name the tensor and the values. Tests check that both accept the
//! same files.

use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::Value;

use crate::error::{Error, Result};
use crate::json;

/// The limit of the format for the length of a header.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes before the header.
const PREFIX: usize = size_of::<u64>();
pub(super) const METADATA: &str = "__metadata__";

/// The tensors of a file. Every range is inside the file.
#[derive(Debug, PartialEq)]
pub(super) struct Header {
    /// In the order of the file.
    pub tensors: Vec<(String, TensorEntry)>,
    /// Metadata entries.
    pub metadata: BTreeMap<String, String>,
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorEntry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Its byte range in the file.
    pub bytes: Range<usize>,
}

impl Header {
    /// Reads and validates the header of a file of length `found`. Reads no more than the header.
    pub(super) fn read(mut file: impl Read, found: u64) -> Result<Header> {
        let mut prefix = [0; PREFIX];
        file.read_exact(&mut prefix).map_err(|_| Error::HeaderTruncated { header: PREFIX as u64, file: found })?;
        let length = u64::from_le_bytes(prefix);
        if length > MAX_HEADER_BYTES {
            return Err(Error::HeaderTooLarge { found: length, limit: MAX_HEADER_BYTES });
        }
        // At most MAX_HEADER_BYTES, so neither the conversion nor the sum can overflow.
        let data = PREFIX + length as usize;
        let mut text = Vec::new();
        match file.take(length).read_to_end(&mut text) {
            Ok(read) if read as u64 == length => {}
            _ => return Err(Error::HeaderTruncated { header: length, file: found }),
        }
        let text = std::str::from_utf8(&text).map_err(|error| damaged(format!("it is not UTF-8 ({error})")))?;
        let map = match json::parse(text) {
            Ok(Value::Object(map)) => map,
            Ok(other) => return Err(damaged(format!("it must be an object, found {}", json::show(&other)))),
            Err(error) => return Err(damaged(error.to_string())),
        };

        let mut metadata = BTreeMap::new();
        let mut infos = Vec::with_capacity(map.len());
        for (name, value) in map {
            if name == METADATA {
                let texts: Option<_> = serde_json::from_value(value).map_err(|error| damaged(format!("`{METADATA}`: {error}")))?;
                metadata = texts.unwrap_or_default();
            } else {
                let info: TensorInfo = serde_json::from_value(value).map_err(|error| damaged(format!("tensor `{name}`: {error}")))?;
                infos.push((name, info));
            }
        }
        infos.sort_by_key(|(_, info)| info.data_offsets);
        let end = check_places(&infos)?;
        // The ranges are valid only if their end is the end of the file.
        if data.checked_add(end).map(|end| end as u64) != Some(found) {
            return Err(Error::FileLength { expected: (data as u64).saturating_add(end as u64), found });
        }
        let placed = |TensorInfo { dtype, shape, data_offsets: (from, to) }| TensorEntry { dtype, shape, bytes: data + from..data + to };
        Ok(Header { tensors: infos.into_iter().map(|(name, info)| (name, placed(info))).collect(), metadata })
    }
}

/// Checks that tensors, sorted by offset, are contiguous and have the right number of bytes. Returns their end.
fn check_places(infos: &[(String, TensorInfo)]) -> Result<usize> {
    let mut end = 0;
    for (name, TensorInfo { dtype, shape, data_offsets: (from, to) }) in infos {
        if *from != end {
            return Err(Error::Offsets { name: name.clone(), expected: end as u64, found: *from as u64 });
        }
        let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &n| bits.checked_mul(n));
        let Some(bits) = bits else {
            return Err(damaged(format!("tensor `{name}` of shape {shape:?} has too many values")));
        };
        if to.checked_sub(*from).and_then(|found| found.checked_mul(8)) != Some(bits) {
            let (expected, found) = (bits.div_ceil(8) as u64, to.saturating_sub(*from) as u64);
            return Err(Error::TensorBytes { name: name.clone(), dtype: dtype.to_string(), shape: shape.clone(), expected, found });
        }
        end = *to;
    }
    Ok(end)
}

/// The length prefix and the header of a new file, padded to a multiple of eight bytes.
pub(super) fn to_bytes<'a>(
    tensors: impl Iterator<Item = (&'a str, &'a [usize])>,
    dtype: Dtype,
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>> {
    let mut text = String::from("{");
    if !metadata.is_empty() {
        text += &format!("\"{METADATA}\":{}", as_json(metadata));
    }
    let mut end = 0usize;
    for (name, shape) in tensors {
        // The values are in memory, so the product does not overflow.
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let info = TensorInfo { dtype, shape: shape.to_vec(), data_offsets: (end, end + bytes) };
        end += bytes;
        let comma = if text.len() > 1 { "," } else { "" };
        text += &format!("{comma}{}:{}", as_json(name), as_json(&info));
    }
    text.push('}');
    let length = text.len().next_multiple_of(PREFIX);
    if length as u64 > MAX_HEADER_BYTES {
        return Err(Error::HeaderTooLarge { found: length as u64, limit: MAX_HEADER_BYTES });
    }
    let mut bytes = (length as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes.resize(PREFIX + length, b' ');
    Ok(bytes)
}

fn as_json<T: serde::Serialize + ?Sized>(value: &T) -> String {
    serde_json::to_string(value).expect("strings and numbers under string keys always have a JSON form")
}

fn damaged(problem: String) -> Error {
    Error::Header { problem }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(bytes.len() + data, 7);
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Header> {
        Header::read(bytes, bytes.len() as u64)
    }

    /// Name, type, shape and bytes of every tensor, by name.
    type TensorList = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

    /// The tensors according to the `safetensors` crate, if it accepts the file.
    fn theirs(bytes: &[u8]) -> Option<TensorList> {
        let tensors = safetensors::SafeTensors::deserialize(bytes).ok()?.tensors();
        let mut tensors: Vec<_> =
            tensors.into_iter().map(|(name, view)| (name, view.dtype(), view.shape().to_vec(), view.data().to_vec())).collect();
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        Some(tensors)
    }

    fn ours(bytes: &[u8]) -> Option<TensorList> {
        let tensors = parse(bytes).ok()?.tensors;
        let mut tensors: Vec<_> =
            tensors.into_iter().map(|(name, entry)| (name, entry.dtype, entry.shape, bytes[entry.bytes].to_vec())).collect();
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        Some(tensors)
    }

    /// The only difference: a duplicate name is an error here; the `safetensors` crate drops one of the tensors.
    fn has_duplicate_name(bytes: &[u8]) -> bool {
        parse(bytes).is_err_and(|error| error.to_string().contains("occurs twice"))
    }

    prop_compose! {
        fn valid()(tensors in vec(("[a-c]{1,3}", vec(0usize..4, 0..3), 0usize..6), 0..5), metadata in any::<bool>()) -> Vec<u8> {
            let types = [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F64, Dtype::I64, Dtype::BOOL];
            let mut end = 0;
            let mut map = serde_json::Map::new();
            for (name, shape, dtype) in tensors {
                if map.contains_key(&name) {
                    continue;
                }
                let dtype = types[dtype];
                let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
                map.insert(name, serde_json::to_value(TensorInfo { dtype, shape, data_offsets: (end, end + bytes) }).unwrap());
                end += bytes;
            }
            if metadata {
                map.insert(METADATA.into(), serde_json::json!({"format": "pt"}));
            }
            file(&Value::Object(map).to_string(), end)
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_parsed_or_rejected(bytes in vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn arbitrary_entries_are_parsed_or_rejected(
            tensors in vec(r#""[a-c]":\{"dtype":"(F32|U8|F4)","shape":\[(0|[1-9][0-9]{0,18})?\],"data_offsets":\[0,[1-9][0-9]{0,18}\]\}"#, 0..3)
        ) {
            let json = format!("{{{}}}", tensors.join(","));
            let bytes = file(&json, 8);
            prop_assert!(has_duplicate_name(&bytes) || ours(&bytes) == theirs(&bytes));
        }

        #[test]
        fn valid_files_match_the_safetensors_crate(bytes in valid()) {
            prop_assert!(ours(&bytes).is_some());
            prop_assert_eq!(ours(&bytes), theirs(&bytes));
        }

        #[test]
        fn truncated_files_are_rejected(bytes in valid(), keep in 0.0..1.0f64) {
            let keep = (bytes.len() as f64 * keep) as usize;
            prop_assert!(parse(&bytes[..keep]).is_err());
        }

        #[test]
        fn flipped_bits_never_panic_and_match_the_safetensors_crate(mut bytes in valid(), place in 0.0..1.0f64, bit in 0..8u32) {
            let place = (bytes.len() as f64 * place) as usize;
            bytes[place] ^= 1 << bit;
            prop_assert!(has_duplicate_name(&bytes) || ours(&bytes) == theirs(&bytes));
        }

        #[test]
        fn written_headers_round_trip(names in proptest::collection::btree_set("\\PC{1,8}", 1..5), shape in vec(0usize..5, 0..3)) {
            let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
            let mut bytes = to_bytes(names.iter().map(|name| (name.as_str(), &shape[..])), Dtype::F16, &metadata).unwrap();
            prop_assert_eq!(bytes.len() % 8, 0);
            bytes.resize(bytes.len() + names.len() * shape.iter().product::<usize>() * 2, 1);
            let header = parse(&bytes).unwrap();
            prop_assert_eq!(&header.metadata, &metadata);
            let read: Vec<_> = header.tensors.iter().map(|(name, _)| name.clone()).collect();
            let all_empty = shape.contains(&0);
            prop_assert!(all_empty || read == names.into_iter().collect::<Vec<_>>());
            prop_assert!(header.tensors.iter().all(|(_, entry)| entry.shape == shape && entry.dtype == Dtype::F16));
            prop_assert_eq!(ours(&bytes), theirs(&bytes));
        }
    }

    #[test]
    fn an_overflowing_total_length_is_rejected() {
        let step = 1usize << 60;
        let tensors =
            (0..15).map(|i| format!(r#""t{i:02}":{{"dtype":"U8","shape":[{step}],"data_offsets":[{},{}]}}"#, i * step, (i + 1) * step));
        let last = format!(r#""t15":{{"dtype":"U8","shape":[{}],"data_offsets":[{},{}]}}"#, step - 1, 15 * step, usize::MAX);
        let json = format!("{{{},{last}}}", tensors.collect::<Vec<_>>().join(","));
        let error = parse(&file(&json, 8)).unwrap_err();
        assert!(matches!(error, Error::FileLength { expected: u64::MAX, .. }), "{error}");
    }
}
