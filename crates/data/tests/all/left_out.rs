//! What a build leaves out, it says in one sentence.

use crate::support;

use support::*;

#[test]
fn what_is_left_out_is_named_with_the_way_to_get_it() {
    let folder = Folder::new();
    folder.write("d.parquet", "PAR1");
    folder.write("d.jsonl.zst", "");
    let (parquet, zst) = (folder.path("d.parquet"), folder.path("d.jsonl.zst"));
    let hub = "hf://datasets/owner/name/*".to_string();
    for (asked, feature, there) in
        [(parquet, "parquet", cfg!(feature = "parquet")), (zst, "zstd", cfg!(feature = "zstd")), (hub, "hub", cfg!(feature = "hub"))]
    {
        if there {
            continue;
        }
        let config = termwise_data::DataConfig { sources: vec![asked.clone()], ..Default::default() };
        let error = prepare(&folder, &config).unwrap_err().to_string();
        assert!(error.contains(&asked) && error.contains(&format!("cargo build --release --features {feature}`")), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    if !cfg!(feature = "hub") {
        let error = termwise_data::hub::folder("hf://owner/name").unwrap_err().to_string();
        assert!(error.contains("`hf://owner/name`") && error.contains("--features hub`"), "{error}");
    }
}
