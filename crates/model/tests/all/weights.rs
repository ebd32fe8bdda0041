//! Reading and writing of weights, intact and damaged.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};
use termwise_model::params::{ParamInit, ParamRole, ParamSpec};
use termwise_model::weights::{Checkpoint, FloatType, INDEX_FILE, NamedTensor, SINGLE_FILE, WriteOptions, write, write_file};
use termwise_model::{Config, Error};

/// A file with this header and these data.
fn file(folder: &TempDir, header: &str, data: &[u8]) -> PathBuf {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    raw(folder, &bytes)
}

fn raw(folder: &TempDir, bytes: &[u8]) -> PathBuf {
    let path = folder.path().join(SINGLE_FILE);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Error>, words: &[&str]) {
    let error = result.unwrap_err().to_string();
    for word in words {
        assert!(error.contains(word), "`{word}` is not in: {error}");
    }
}

fn values(count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 % 101) as f32 - 50.0) / 16.0).collect()
}

fn spec(name: &str, shape: &[usize]) -> ParamSpec {
    let role = if name == "model.embed_tokens.weight" { ParamRole::Embedding } else { ParamRole::Mlp };
    ParamSpec { name: name.into(), shape: shape.to_vec(), init: ParamInit::Normal, role }
}

fn with_dtype(dtype: FloatType) -> WriteOptions {
    WriteOptions::default().dtype(dtype)
}

#[test]
fn every_type_round_trips() {
    let data = values(12);
    for dtype in FloatType::ALL {
        let folder = tempdir().unwrap();
        write(folder.path(), [NamedTensor { name: "a", shape: &[3, 4], data: &data }], &with_dtype(dtype)).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        // Multiples of 1/16 below 4 are exact in all three types.
        assert_eq!(checkpoint.read("a").unwrap(), (vec![3, 4], data.clone()), "{dtype}");
        assert_eq!(checkpoint.metadata(), &BTreeMap::from([("format".to_string(), "pt".to_string())]));
        assert_eq!(checkpoint.bytes("a").unwrap().len(), 12 * dtype.bytes());
        assert_eq!(dtype.to_string().parse(), Ok(dtype));
    }
    assert!("int8".parse::<FloatType>().unwrap_err().contains("float32, float16 or bfloat16"));
}

/// Values are read in chunks, the last of which is shorter.
#[test]
fn large_tensors_round_trip() {
    let data: Vec<f32> = (0..600_001).map(|i| (i % 251) as f32 / 16.0).collect();
    for dtype in [FloatType::F32, FloatType::Bf16] {
        let folder = tempdir().unwrap();
        let tensors =
            [NamedTensor { name: "a", shape: &[3], data: &[1.0, 2.0, 3.0] }, NamedTensor { name: "b", shape: &[data.len()], data: &data }];
        write(folder.path(), tensors, &with_dtype(dtype)).unwrap();
        assert!(Checkpoint::open(folder.path()).unwrap().read("b").unwrap().1 == data, "{dtype}");
    }
}

#[test]
fn a_file_truncated_while_open_is_an_error() {
    let folder = tempdir().unwrap();
    let data = vec![1.0; 100_000];
    let tensors =
        [NamedTensor { name: "a", shape: &[3], data: &[1.0, 2.0, 3.0] }, NamedTensor { name: "b", shape: &[data.len()], data: &data }];
    write(folder.path(), tensors, &WriteOptions::default()).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::File::options().write(true).open(&path).unwrap().set_len(8192).unwrap();
    assert_eq!(checkpoint.read("a").unwrap().1, [1.0, 2.0, 3.0]);
    let error = checkpoint.read("b").unwrap_err().to_string();
    assert!(error.contains("cannot read") && error.contains("model.safetensors"), "{error}");
}

#[test]
fn float64_and_int64_are_read() {
    let folder = tempdir().unwrap();
    let mut data: Vec<u8> = [1.5f64, -2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    data.extend([7i64, -1, i64::MAX].iter().flat_map(|x| x.to_le_bytes()));
    let header = r#"{"f":{"dtype":"F64","shape":[2],"data_offsets":[0,16]},"i":{"dtype":"I64","shape":[3],"data_offsets":[16,40]}}"#;
    let checkpoint = Checkpoint::open(file(&folder, header, &data)).unwrap();
    assert_eq!(checkpoint.read("f").unwrap(), (vec![2], vec![1.5, -2.0]));
    assert_eq!(checkpoint.read_i64("i").unwrap(), (vec![3], vec![7, -1, i64::MAX]));
    assert_eq!((checkpoint.info("i").unwrap().dtype, checkpoint.info("i").unwrap().shape), (Dtype::I64, &[3][..]));
    refused(checkpoint.read("i"), &["tensor `i`", "I64", "F32"]);
    refused(checkpoint.read_i64("f"), &["tensor `f`", "F64", "I64"]);
    refused(checkpoint.check(&[spec("f", &[2]), spec("i", &[3])]), &["tensor `i`", "I64", "BF16"]);
}

#[test]
fn reading_checks_name_shape_and_buffer() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("some.safetensors");
    write_file(&path, [NamedTensor { name: "layer.weight", shape: &[2, 3], data: &values(6) }], &WriteOptions::default()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let mut buffer = [0.0; 6];
    refused(
        checkpoint.read_into("layer.weigth", &[2, 3], &mut buffer),
        &["some.safetensors", "`layer.weigth`", "did you mean", "`layer.weight`"],
    );
    refused(checkpoint.read_into("layer.weight", &[3, 2], &mut buffer), &["`layer.weight`", "[3, 2]", "[2, 3]"]);
    refused(checkpoint.read_into("layer.weight", &[2, 3], &mut buffer[..5]), &["`layer.weight`", "6 values", "5"]);
    checkpoint.read_into("layer.weight", &[2, 3], &mut buffer).unwrap();
    assert_eq!(buffer.as_slice(), values(6));
}

#[test]
fn nan_and_infinity_are_reported() {
    for (bad, word) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let folder = tempdir().unwrap();
        let mut data = values(6);
        data[4] = bad;
        data[5] = f32::NAN;
        let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
        let path = file(&folder, r#"{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#, &bytes);
        refused(Checkpoint::open(&path).unwrap().read("w"), &["tensor `w`", &format!(" {word} "), "[1, 1]"]);
        let out = folder.path().join("out.safetensors");
        refused(
            write_file(&out, [NamedTensor { name: "w", shape: &[2, 3], data: &data }], &WriteOptions::default()),
            &["`w`", word, "[1, 1]"],
        );
        assert!(!out.exists());
    }
    let folder = tempdir().unwrap();
    let large = [1.0, 7e4];
    let tensor = NamedTensor { name: "w", shape: &[2], data: &large };
    refused(write(folder.path(), [tensor], &with_dtype(FloatType::F16)), &["`w`", "70000", "[1]", "float16"]);
    write(folder.path(), [tensor], &with_dtype(FloatType::Bf16)).unwrap();
    let huge = [f32::MAX];
    refused(
        write(folder.path(), [NamedTensor { name: "w", shape: &[1], data: &huge }], &with_dtype(FloatType::Bf16)),
        &["`w`", "bfloat16"],
    );
    // The rejected write left the earlier file and no other.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    assert_eq!(Checkpoint::open(folder.path()).unwrap().info("w").unwrap().shape, [2]);
}

#[test]
fn damaged_files_are_rejected() {
    let folder = tempdir().unwrap();
    let damaged = |header: &str, data: usize, words: &[&str]| {
        let error = Checkpoint::open(file(&folder, header, &vec![0; data])).unwrap_err().to_string();
        assert!(error.contains("model.safetensors: "), "{error}");
        words.iter().for_each(|word| assert!(error.contains(word), "`{word}` is not in: {error}"));
    };
    let a = |from: usize, to: usize| format!(r#""a":{{"dtype":"F32","shape":[2],"data_offsets":[{from},{to}]}}"#);
    let b = |from: usize, to: usize| format!(r#""b":{{"dtype":"F32","shape":[2],"data_offsets":[{from},{to}]}}"#);

    damaged(&format!("{{{}}}", a(0, 8)), 7, &["truncated"]);
    damaged(&format!("{{{}}}", a(0, 8)), 9, &["too long"]);
    damaged(&format!("{{{},{}}}", a(0, 8), b(4, 12)), 12, &["`b`", "byte 4", "expected 8", "overlaps"]);
    damaged(&format!("{{{},{}}}", a(0, 8), b(12, 20)), 20, &["`b`", "byte 12", "expected 8", "no tensor"]);
    damaged(&format!("{{{}}}", a(4, 12)), 12, &["`a`", "byte 4", "expected 0"]);
    damaged(&format!("{{{}}}", a(0, 4)), 4, &["`a`", "F32 [2]", "needs 8 bytes", "specifies 4"]);
    damaged(&format!("{{{}}}", a(0, 8).replace("F32", "BF16")), 8, &["`a`", "BF16 [2]", "needs 4 bytes", "specifies 8"]);
    damaged(&format!("{{{}}}", a(0, 8).replace("F32", "Q9")), 8, &["`a`", "Q9"]);
    damaged(&format!("{{{}}}", a(0, 8).replace("[2]", "[-2]")), 8, &["`a`", "-2"]);
    damaged(&format!("{{{}}}", a(0, 8).replace("[2]", &format!("[{},{}]", u64::MAX, 2))), 8, &["`a`", "too many values"]);
    damaged(&format!("{{{},{}}}", a(0, 8), a(0, 8)), 8, &["`a` occurs twice"]);
    damaged(r#"{"a":{"dtype":"F32","shape":[2]}}"#, 8, &["`a`", "data_offsets"]);
    damaged(r#"{"__metadata__":{"n":1}}"#, 0, &["__metadata__"]);
    damaged("[]", 0, &["an object"]);
    damaged("{", 0, &["JSON"]);
    damaged("", 0, &["JSON"]);

    refused(Checkpoint::open(raw(&folder, &[])), &["model.safetensors", "has 0"]);
    refused(Checkpoint::open(raw(&folder, &[1, 0, 0])), &["8 bytes", "has 3"]);
    refused(Checkpoint::open(raw(&folder, &[200, 0, 0, 0, 0, 0, 0, 0, b'{', b'}'])), &["200 bytes", "has 10"]);
    refused(Checkpoint::open(raw(&folder, &[0xff; 64])), &["18446744073709551615", "100000000"]);
    refused(Checkpoint::open(raw(&folder, b"\x02\0\0\0\0\0\0\0\xff\xff")), &["UTF-8"]);
}

#[test]
fn paths_without_weights_are_reported() {
    let folder = tempdir().unwrap();
    refused(Checkpoint::open(folder.path()), &[&folder.path().display().to_string(), SINGLE_FILE, INDEX_FILE]);
    refused(Checkpoint::open(folder.path().join("x.safetensors")), &["x.safetensors", "no weights"]);
}

fn many() -> Vec<(String, Vec<usize>, Vec<f32>)> {
    (0..7).map(|i| (format!("t{i}"), vec![i + 1, 3], values((i + 1) * 3))).collect()
}

fn refs(tensors: &[(String, Vec<usize>, Vec<f32>)]) -> impl Iterator<Item = NamedTensor<'_>> {
    tensors.iter().map(|(name, shape, data)| NamedTensor { name, shape, data })
}

fn sharded(folder: &Path, most: u64) {
    write(folder, refs(&many()), &WriteOptions::default().max_shard_bytes(Some(most))).unwrap();
}

fn change_index(folder: &Path, change: impl Fn(&mut Value)) {
    let path = folder.join(INDEX_FILE);
    let mut index: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut index);
    std::fs::write(&path, index.to_string()).unwrap();
}

#[test]
fn shards_are_written_and_read() {
    let folder = tempdir().unwrap();
    write(folder.path(), [NamedTensor { name: "old", shape: &[1], data: &[1.0] }], &WriteOptions::default()).unwrap();
    // Bytes: 12, 24, 36, 48, 60, 72, 84. Split at 80: [12, 24, 36], [48], [60], [72], [84].
    sharded(folder.path(), 80);
    let mut files: Vec<String> = std::fs::read_dir(folder.path()).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
    files.sort();
    let mut expected: Vec<String> = (1..=5).map(|i| format!("model-{i:05}-of-00005.safetensors")).collect();
    expected.push(INDEX_FILE.into());
    assert_eq!(files, expected);
    let index: Value = serde_json::from_str(&std::fs::read_to_string(folder.path().join(INDEX_FILE)).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], json!(336));
    assert_eq!((&index["weight_map"]["t2"], &index["weight_map"]["t3"]), (&json!(expected[0]), &json!(expected[1])));

    for path in [folder.path().to_owned(), folder.path().join(INDEX_FILE)] {
        let checkpoint = Checkpoint::open(path).unwrap();
        assert_eq!(checkpoint.names().count(), 7);
        for (name, shape, data) in many() {
            assert_eq!(checkpoint.read(&name).unwrap(), (shape, data));
        }
    }
    // If everything fits within the limit, one file is written, and it is the one that is read.
    sharded(folder.path(), 336);
    assert!(folder.path().join(SINGLE_FILE).is_file());
    assert_eq!(Checkpoint::open(folder.path()).unwrap().path(), folder.path().join(SINGLE_FILE));
}

#[test]
fn invalid_indices_are_rejected() {
    let folder = tempdir().unwrap();
    let path = folder.path();
    sharded(path, 80);
    let good = std::fs::read_to_string(path.join(INDEX_FILE)).unwrap();
    let outside = ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "./x.safetensors", "x/", "..\\x", "a\0b"];
    for shard in outside {
        change_index(path, |index| index["weight_map"]["t0"] = json!(shard));
        refused(Checkpoint::open(path), &[INDEX_FILE, "must be a file name"]);
    }
    std::fs::write(path.join(INDEX_FILE), &good).unwrap();
    change_index(path, |index| index["weight_map"]["t9"] = json!("model-00002-of-00005.safetensors"));
    refused(Checkpoint::open(path), &["model-00002-of-00005.safetensors", "only the index lists `t9`"]);

    std::fs::write(path.join(INDEX_FILE), &good).unwrap();
    change_index(path, |index| index["weight_map"]["t0"] = json!("model-00002-of-00005.safetensors"));
    refused(Checkpoint::open(path), &["model-00001-of-00005.safetensors", "only the shard lists `t0`"]);

    for (index, word) in
        [(json!({}), "weight_map"), (json!({"weight_map": []}), "an object"), (json!({"weight_map": {"a": 1}}), "weight_map.a")]
    {
        std::fs::write(path.join(INDEX_FILE), index.to_string()).unwrap();
        refused(Checkpoint::open(path), &[INDEX_FILE, word]);
    }
    std::fs::write(path.join(INDEX_FILE), "{").unwrap();
    refused(Checkpoint::open(path), &[INDEX_FILE, "JSON"]);

    std::fs::write(path.join(INDEX_FILE), &good).unwrap();
    let shard = path.join("model-00003-of-00005.safetensors");
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    refused(Checkpoint::open(path), &["model-00003-of-00005.safetensors", "truncated"]);
    std::fs::remove_file(&shard).unwrap();
    refused(Checkpoint::open(path), &[INDEX_FILE, "`model-00003-of-00005.safetensors`", "is missing"]);
}

#[test]
fn weights_and_configuration_that_disagree_are_reported() {
    let folder = tempdir().unwrap();
    let data = values(12);
    let tensor = |name, shape| NamedTensor { name, shape, data: &data };
    let held = [
        tensor("model.embed_tokens.weight", &[3, 4]),
        tensor("lm_head.weight", &[3, 4]),
        tensor("model.layers.0.self_attn.rotary_emb.inv_freq", &[12]),
        tensor("model.norm.weight", &[12]),
    ];
    write(folder.path(), held, &WriteOptions::default()).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let (embedding, head, norm) =
        (spec("model.embed_tokens.weight", &[3, 4]), spec("lm_head.weight", &[3, 4]), spec("model.norm.weight", &[12]));
    checkpoint.check(&[embedding.clone(), norm.clone()]).unwrap();
    checkpoint.check(&[embedding.clone(), norm.clone(), head.clone()]).unwrap();

    let other = [spec("model.embed_tokens.weight", &[3, 4]), spec("model.norm.weight", &[3]), spec("lm_head.weight", &[4, 4])];
    refused(checkpoint.check(&other), &["model.safetensors", "`model.norm.weight`", "[3]", "[12]", "1 more"]);
    // Another shape than that of the embedding: not a copy of it.
    refused(checkpoint.check(&[spec("model.embed_tokens.weight", &[4, 3]), norm.clone()]), &["1 tensor is not used", "`lm_head.weight`"]);
    refused(checkpoint.check(&[embedding.clone(), head.clone()]), &["1 tensor is not used", "`model.norm.weight`"]);
    let missing: Vec<ParamSpec> = (0..8).map(|i| spec(&format!("m{i}"), &[1])).collect();
    refused(checkpoint.check(&missing), &["8 tensors are missing", "`m0`, `m1`, `m2`, `m3`, `m4` and 3 more"]);

    write(folder.path(), [held[0], held[3]], &WriteOptions::default()).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    refused(checkpoint.check(&[embedding, head, norm]), &["1 tensor is missing: `lm_head.weight`", "tie_word_embeddings"]);
}

#[test]
fn tensors_that_cannot_be_written_are_rejected() {
    let folder = tempdir().unwrap();
    let write_all = |tensors: &[NamedTensor]| write(folder.path(), tensors.iter().copied(), &WriteOptions::default());
    let tensor = |name, shape, data| NamedTensor { name, shape, data };
    refused(write_all(&[tensor("a", &[1], &[0.0]), tensor("a", &[1], &[0.0])]), &["`a`", "the same name"]);
    refused(write_all(&[tensor("__metadata__", &[1], &[0.0])]), &["`__metadata__`"]);
    refused(write_all(&[tensor("a", &[2, 2], &[0.0])]), &["`a` [2, 2]", "4 values", "1"]);
    refused(write_all(&[tensor("a", &[usize::MAX, 2], &[0.0])]), &["`a` [18446744073709551615, 2]"]);
    refused(write(folder.path().join("none"), [tensor("a", &[1], &[0.0])], &WriteOptions::default()), &["none", "create"]);
    write_all(&[tensor("scalar", &[], &[3.0]), tensor("empty", &[0, 4], &[])]).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!((checkpoint.read("scalar").unwrap(), checkpoint.read("empty").unwrap()), ((vec![], vec![3.0]), (vec![0, 4], vec![])));
}

#[cfg(unix)]
#[test]
fn written_files_have_default_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempdir().unwrap();
    write(folder.path(), [NamedTensor { name: "a", shape: &[1], data: &[1.0] }], &WriteOptions::default()).unwrap();
    std::fs::write(folder.path().join("other"), "").unwrap();
    let mode = |name: &str| std::fs::metadata(folder.path().join(name)).unwrap().permissions().mode();
    assert_eq!(mode(SINGLE_FILE), mode("other"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn arbitrary_tensors_round_trip_through_shards(
        sizes in proptest::collection::vec((0usize..6, 1usize..6), 1..10),
        most in prop::option::of(0u64..200),
        seed in any::<u32>(),
    ) {
        let folder = tempdir().unwrap();
        let number = |i: usize| f32::from_bits((i as u32).wrapping_mul(2654435761).wrapping_add(seed));
        let finite = |i: usize| if number(i).is_finite() { number(i) } else { 0.0 };
        let tensors: Vec<_> = sizes.iter().enumerate().map(|(t, &(rows, columns))| {
            (format!("t{t}"), vec![rows, columns], (0..rows * columns).map(|i| finite(t * 64 + i)).collect::<Vec<f32>>())
        }).collect();
        write(folder.path(), refs(&tensors), &WriteOptions::default().max_shard_bytes(most)).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        prop_assert_eq!(checkpoint.names().count(), tensors.len());
        for (name, shape, data) in &tensors {
            let (found, values) = checkpoint.read(name).unwrap();
            prop_assert_eq!(&found, shape);
            prop_assert!(values.iter().zip(data).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }

    #[test]
    fn damaged_files_never_panic(place in 0.0..1.0f64, bit in 0..8u32, keep in 0.0..2.0f64) {
        let folder = tempdir().unwrap();
        write(folder.path(), refs(&many()), &WriteOptions::default()).unwrap();
        let path = folder.path().join(SINGLE_FILE);
        let mut bytes = std::fs::read(&path).unwrap();
        let place = (bytes.len() as f64 * place) as usize;
        bytes[place] ^= 1 << bit;
        bytes.truncate((bytes.len() as f64 * keep) as usize);
        std::fs::write(&path, &bytes).unwrap();
        if let Ok(checkpoint) = Checkpoint::open(&path) {
            for name in checkpoint.names() {
                let _ = (checkpoint.read(name), checkpoint.read_i64(name));
            }
        }
    }
}

#[test]
fn a_trained_model_is_read() {
    let Some(folder) = termwise_base::test_skip::shared("data/stories260K") else { return };
    let specs = Config::read(&folder).unwrap().parameter_list().unwrap();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    checkpoint.check(&specs).unwrap();
    let mut tensors = Vec::new();
    for ParamSpec { name, shape, .. } in &specs {
        let mut data = vec![0.0; shape.iter().product()];
        checkpoint.read_into(name, shape, &mut data).unwrap();
        assert!(data.iter().any(|&x| x != 0.0), "{name}");
        tensors.push((name.clone(), shape.clone(), data));
    }
    let copy = tempdir().unwrap();
    write(copy.path(), refs(&tensors), &WriteOptions::default().max_shard_bytes(Some(100_000))).unwrap();
    let copied = Checkpoint::open(copy.path()).unwrap();
    copied.check(&specs).unwrap();
    for ParamSpec { name, .. } in &specs {
        assert_eq!(copied.bytes(name).unwrap(), checkpoint.bytes(name).unwrap(), "{name}");
    }
}

#[test]
fn reference_cases_contain_the_tensors_of_their_variants() {
    let Some(folder) = termwise_base::test_skip::shared("golden") else { return };
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let case = Checkpoint::open(&path).unwrap();
        let size = |key: &str| case.metadata()[key].parse::<f64>().unwrap();
        let config = json!({
            "hidden_size": size("hidden") as u64, "num_attention_heads": size("heads") as u64, "num_hidden_layers": size("layers") as u64,
            "intermediate_size": size("inter") as u64, "vocab_size": size("vocab") as u64, "rope_theta": size("rope_theta"),
            "rms_norm_eps": size("rms_norm_eps"), "attention_type": case.metadata()["attention_type"],
        });
        let config = Config::from_json_str(&config.to_string(), "case").unwrap();
        let held: BTreeMap<&str, &[usize]> =
            case.names().filter_map(|name| Some((name.strip_prefix("weight:")?, case.info(name).unwrap().shape))).collect();
        let specs = config.parameter_list().unwrap();
        let asked: BTreeMap<&str, &[usize]> = specs.iter().map(|spec| (spec.name.as_str(), &spec.shape[..])).collect();
        assert_eq!(held, asked, "{}", path.display());
        let (shape, ids) = case.read_i64("input_ids").unwrap();
        assert_eq!(shape, [size("batch") as usize, size("seq") as usize]);
        assert!(ids.iter().all(|&id| (0..config.vocab_size as i64).contains(&id)));
        seen += 1;
    }
    assert!(seen > 0);
}
