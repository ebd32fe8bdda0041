//! Missing features are reported in one sentence.

use crate::support;

use support::*;

/// One line that names the source and the feature.
fn is_left_out(error: &termwise_data::Error, requested: &str, feature: &str) {
    let text = error.to_string();
    assert!(text.contains(&format!("`{requested}`")) && text.contains(&format!("`cargo build --release --features {feature}`")), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[test]
fn the_error_names_the_source_and_the_feature() {
    let error = termwise_data::Error::LeftOut { requested: "d.parquet".into(), support: "Parquet files", feature: "parquet" };
    is_left_out(&error, "d.parquet", "parquet");
}

#[test]
fn missing_features_are_reported_with_the_build_command() {
    let folder = Folder::new();
    folder.write("d.parquet", "PAR1");
    folder.write("d.jsonl.zst", "not Zstandard");
    let (parquet, zst) = (folder.path("d.parquet"), folder.path("d.jsonl.zst"));
    let hub = "hf://datasets/owner/name/*".to_string();
    for (requested, feature, there) in
        [(parquet, "parquet", cfg!(feature = "parquet")), (zst, "zstd", cfg!(feature = "zstd")), (hub, "hub", cfg!(feature = "hub"))]
    {
        // A build with the hub would send a request.
        if there && feature == "hub" {
            continue;
        }
        let config = termwise_data::DataConfig { sources: vec![requested.clone()], ..Default::default() };
        let error = prepare(&folder, &config).unwrap_err();
        match (there, &error) {
            // A build with the feature reads the file and finds it damaged.
            (true, termwise_data::Error::LeftOut { .. }) => panic!("{error}"),
            (true, _) => assert!(error.to_string().contains(&requested), "{error}"),
            (false, _) => is_left_out(&error, &requested, feature),
        }
    }
    if !cfg!(feature = "hub") {
        is_left_out(&termwise_data::hub::folder("hf://owner/name").unwrap_err(), "hf://owner/name", "hub");
    }
}

#[test]
fn tests_of_missing_features_are_counted() {
    let hub = [include_str!("../hub.rs"), include_str!("../hub_models.rs"), include_str!("../hub_hostile.rs")];
    let parquet = [include_str!("parquet.rs"), include_str!("../fuzz.rs"), include_str!("../../src/sources/parquet.rs")];
    termwise_base::test_skip::compiled_out("hub", cfg!(feature = "hub"), &hub);
    termwise_base::test_skip::compiled_out("parquet", cfg!(feature = "parquet"), &parquet);
    // Compressed files are part of several tests.
    let _ = termwise_base::test_skip::need("zstd", "feature zstd, for the part about .zst files", cfg!(feature = "zstd").then_some(()));
}
