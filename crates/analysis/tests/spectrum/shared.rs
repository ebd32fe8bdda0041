//! A real trained model.

use termwise_analysis::spectrum::{Options, measure};
use termwise_model::Model;

#[test]
fn a_trained_model_has_its_known_scores() {
    let Some(folder) = termwise_base::test_skip::shared("data/stories260K") else { return };
    let model = Model::read(&folder).expect("the model");
    let expected: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("expected.json")).expect("a file")).expect("JSON");
    let ids = expected["greedy_200_ids"].as_array().expect("a list of ids");
    let ids: Vec<u32> = ids.iter().filter_map(|id| Some(id.as_u64()? as u32)).collect();
    let found = measure(&model, &[ids], &Options::default(), &mut |_| {}).expect("a spectrum");
    for layer in &found.layers {
        for head in &layer.heads {
            let largest = head.scores.max.abs().max(head.scores.min.abs());
            let dominant = head.terms.as_ref().expect("terms").all.dominant.expect("an order");
            assert!((dominant as f64) <= largest.ceil(), "layer {}, head {}: {dominant} {largest}", layer.layer, head.head);
        }
    }
    let all = || found.layers.iter().flat_map(|layer| &layer.heads);
    let most = all().map(|head| head.scores.max.max(-head.scores.min)).fold(0.0, f64::max);
    assert!((most - 192.8).abs() < 0.1, "the largest score of this text is known: {most}");
    // Scores so far below zero that no order up to 32 is enough for most heads.
    let beyond = all().filter(|head| head.cut.as_ref().is_some_and(|cut| cut.order_for.one_percent.is_none())).count();
    assert!(2 * beyond > all().count(), "{beyond}");
}
