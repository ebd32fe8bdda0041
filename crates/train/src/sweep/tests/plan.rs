use super::*;

#[test]
fn axes_expand_to_every_combination_once() {
    let plan = plan(GRID);
    assert_eq!(plan.axes.iter().map(|axis| axis.key.as_str()).collect::<Vec<_>>(), ["model.attention", "optimizer.lr", "seed"]);
    assert_eq!(plan.jobs.len(), 8);
    let mut hashes: Vec<&str> = plan.jobs.iter().map(|job| job.hash.as_str()).collect();
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 8);
    assert_eq!(plan.name(&plan.jobs[0]), "attention=softmax, lr=0.001, seed=1");
    assert_eq!(plan.name(&plan.jobs[7]), "attention=norm, lr=0.003, seed=2");
    assert_eq!(plan.jobs[7].settings["model"]["attention"].as_str(), Some("norm"));
    assert_eq!(plan.jobs[7].settings["model"]["width"].as_integer(), Some(64), "defaults stay");
}

#[test]
fn equal_settings_are_one_run_in_any_spelling() {
    assert_eq!(plan("[axes]\nseed = [1, 2, 1]").jobs.len(), 2);
    let hash = |text: &str| plan(text).jobs[0].hash.clone();
    assert_eq!(hash(""), hash("[axes]\nseed = [1]"));
    assert_eq!(hash("[base]\nseed = 3\nsteps = 4"), hash("[base]\nsteps = 4\nseed = 3"));
    assert_eq!(hash("[base]\nlog = 3"), hash(""), "settings without effect on results are not hashed");
    assert_ne!(hash("[base]\nseed = 3"), hash(""));
    assert_ne!(hash("[base]\nname = \"a\"\n"), hash("[base]\nname = \"b\"\n"));
}

#[test]
fn a_base_can_be_a_file_next_to_the_sweep() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("base.toml"), "steps = 77").expect("a file");
    std::fs::write(folder.path().join("sweep.toml"), "base = \"base.toml\"\n[axes]\nseed = [5]").expect("a file");
    let plan = Plan::read(&folder.path().join("sweep.toml"), &Plain, "loss").expect("a plan");
    assert_eq!((number(&plan.jobs[0], "steps"), number(&plan.jobs[0], "seed")), (77.0, 5.0));
}

#[test]
fn mistakes_in_the_file_are_reported() {
    for (text, expected) in [
        ("[axes]\natention = [\"softmax\"]", "did you mean `attention`"),
        ("[axes]\n\"optimizer.rl\" = [1]", "did you mean `optimizer.lr`"),
        ("[axes]\nfoobarbaz = [1]", "available: steps"),
        ("[axes]\nwidth = [1]", "model.width or data.width"),
        ("[axes]\nseed = []", "at least one"),
        ("[axes]\nseed = 1", "a list"),
        ("[axes]\nlr = [1]\n\"optimizer.lr\" = [2]", "two axes"),
        ("[axes]\nsteps = [1, 0]", "steps=0: `steps` is 0"),
        ("[base]\nmodel = 3\n[axes]\nattention = [\"softmax\"]", "make it a table"),
        ("axis = 1", "unknown field"),
        ("base = \"absent.toml\"", "cannot read"),
    ] {
        let error = parse(text).expect_err(text).to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let many: Vec<String> = (0..400).map(|n| n.to_string()).collect();
    let text = format!("[axes]\nseed = [{0}]\nsteps = [{0}]", many.join(", "));
    assert!(parse(&text).expect_err("too many").to_string().contains("100000"));
}

#[test]
fn dotted_axes_need_no_quotes() {
    let plan = plan("[axes]\nmodel.width = [1, 2]\noptimizer.lr = [0.1]");
    assert_eq!(plan.jobs.iter().map(|job| number(job, "model.width")).collect::<Vec<_>>(), [1.0, 2.0]);
}
