//! The theorem of arXiv 2310.11685 and the Taylor orders that its inputs need: closed forms, checked by simulation.
//! Nothing is trained, and there are no seeds to spread over: the rules compare probabilities with stated bounds.

use serde::{Deserialize, Serialize};

use super::claim::{Decision, Verdict};
use super::experiment::Id;
use super::results::ClaimOutcome;
use super::scale::Scale;
use crate::Error;
use crate::separation::{self, Bridge, BridgePoint, Network, Point, Reference, Series, Sweep};

/// Lowest success rate of a network that distinguishes the inputs.
const MIN_SUCCESS: f64 = 0.9;
/// Highest success rate of a network that does not.
const MAX_FAILURE: f64 = 0.1;
/// The order found over ln n / ln(1 + a_1), at the largest n.
const RATIO: (f64, f64) = (0.5, 2.0);

/// What was computed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Theorem {
    /// `separation` or `bridge`.
    pub id: Id,
    /// The question.
    pub question: String,
    /// The paper's result.
    pub paper: String,
    /// The basis of the statement.
    pub basis: String,
    /// Success against n.
    pub points: Vec<Point>,
    /// Smallest orders against n.
    pub bridge: Vec<BridgePoint>,
    /// Every claim.
    pub claims: Vec<ClaimOutcome>,
}

/// Draws of every point; verdicts rest on closed forms, so few are enough to see both agree.
fn draws(scale: Scale) -> u64 {
    match scale {
        Scale::Test => 20,
        Scale::Minute | Scale::Text | Scale::Mini | Scale::Zoology => 1000,
        Scale::Laptop | Scale::Paper => separation::DRAWS,
    }
}

/// Computes `separation` or `bridge`; `None` for other experiments.
pub fn compute(id: Id, scale: Scale) -> Result<Option<Theorem>, Error> {
    let basis = separation::RECONSTRUCTION.to_owned();
    let draws = draws(scale);
    Ok(match id {
        Id::Separation => {
            let points = Sweep { draws, ..Sweep::theorem() }.run(&mut |_, _| ())?;
            let mut claims = vec![
                bound(
                    &points,
                    Network::Softmax,
                    "one layer of softmax attention distinguishes the two input families at every length",
                    Side::Succeeds,
                ),
                bound(&points, Network::Linear, "one layer of linear attention does not for long inputs", Side::Fails),
            ];
            claims.push(figures(&Reference::run(draws, 1)?));
            Some(Theorem {
                id,
                question: "Are there inputs that one layer of softmax attention distinguishes and one layer of linear attention does not?"
                    .into(),
                paper: "Yes: with high probability for softmax, and with probability close to zero for linear attention.".into(),
                basis,
                points,
                bridge: Vec::new(),
                claims,
            })
        }
        Id::Bridge => {
            let bridge = Bridge { draws, ..Bridge::default() }.run()?;
            Some(Theorem {
                id,
                question: "How many Taylor orders do the inputs of the theorem need?".into(),
                paper: "Not in the papers: it combines the Taylor orders of one with the inputs of the other.".into(),
                basis,
                points: Vec::new(),
                claims: vec![grows(&bridge), logarithmic(&bridge)],
                bridge,
            })
        }
        _ => None,
    })
}

enum Side {
    Succeeds,
    Fails,
}

fn decided(text: &str, stated: String, verdict: Verdict, note: String) -> ClaimOutcome {
    let decision = Decision { note, ..Decision::new(verdict) };
    ClaimOutcome { text: text.into(), rule: None, stated, also: Vec::new(), decision }
}

/// At the largest n.
fn bound(points: &[Point], network: Network, text: &str, side: Side) -> ClaimOutcome {
    let last = points.iter().filter(|point| point.network == network).max_by_key(|point| point.setting.n);
    let Some(point) = last else { return decided(text, String::new(), Verdict::Undecided, "no such point".into()) };
    let (n, exact, share) = (point.setting.n, point.exact, point.share);
    let holds = |succeeds: bool| if succeeds { exact >= MIN_SUCCESS } else { exact <= MAX_FAILURE };
    let (expected, stated) = match side {
        Side::Succeeds => (true, format!("success probability at n = {n} at least {MIN_SUCCESS}; at most {MAX_FAILURE} contradicts")),
        Side::Fails => (false, format!("success probability at n = {n} at most {MAX_FAILURE}; at least {MIN_SUCCESS} contradicts")),
    };
    let verdict = match () {
        () if holds(expected) => Verdict::Reproduced,
        () if holds(!expected) => Verdict::Contradicted,
        () => Verdict::Inconclusive,
    };
    let note = format!("{exact:.3} in closed form, {:.3} of {} draws at n = {n}", share.success, share.draws);
    decided(text, stated, verdict, note)
}

fn figures(reference: &Reference) -> ClaimOutcome {
    let all = || reference.figures.iter().map(|found| found.verdict).chain(reference.orders.iter().map(|found| found.verdict));
    let count = |verdict| all().filter(|&found| found == verdict).count();
    let differing = count(separation::Verdict::Differs);
    let verdict = if differing == 0 { Verdict::Reproduced } else { Verdict::Contradicted };
    let note = format!(
        "{} of {} agree, {} within what {} draws would give, {differing} differ",
        count(separation::Verdict::Agrees),
        all().count(),
        count(separation::Verdict::Chance),
        separation::REFERENCE_DRAWS
    );
    let stated =
        "every reference value is within its interval, or within that of a small-sample simulation; a value outside contradicts the claim";
    decided("the reference figures of the reconstruction hold", stated.into(), verdict, note)
}

/// The orders over n of every series and a_1.
fn rows(bridge: &[BridgePoint]) -> Vec<Vec<&BridgePoint>> {
    let mut rows: Vec<Vec<&BridgePoint>> = Vec::new();
    for point in bridge {
        match rows.iter_mut().find(|row| row[0].series == point.series && row[0].setting.a1 == point.setting.a1) {
            Some(row) => row.push(point),
            None => rows.push(vec![point]),
        }
    }
    rows.iter_mut().for_each(|row| row.sort_by_key(|point| point.setting.n));
    rows
}

fn grows(bridge: &[BridgePoint]) -> ClaimOutcome {
    let rows = rows(bridge);
    let orders = |row: &[&BridgePoint]| row.iter().map(|point| point.order).collect::<Option<Vec<u32>>>();
    let rising = rows.iter().filter(|row| orders(row).is_some_and(|orders| orders.windows(2).all(|pair| pair[0] < pair[1]))).count();
    let falling = rows.iter().any(|row| orders(row).is_some_and(|orders| orders.last() < orders.first()));
    let verdict = match () {
        () if rising == rows.len() => Verdict::Reproduced,
        () if falling => Verdict::Contradicted,
        () => Verdict::Inconclusive,
    };
    let taylor = rows.iter().filter(|row| row[0].series == Series::Taylor).map(|row| {
        let list: Vec<String> = row.iter().map(|point| point.order.map_or("none".into(), |order| order.to_string())).collect();
        format!("a₁ = {}: {}", row[0].setting.a1, list.join(", "))
    });
    let note = format!("orders for n = 10² to 10⁶, Taylor, {}", taylor.collect::<Vec<_>>().join("; "));
    let stated =
        "for every a₁ and both series the smallest order with success 0.9 rises from each n to the next; a fall over all contradicts";
    decided("longer inputs need higher orders", stated.into(), verdict, note)
}

fn logarithmic(bridge: &[BridgePoint]) -> ClaimOutcome {
    let rows = rows(bridge);
    let ratio = |row: &Vec<&BridgePoint>| row.last().and_then(|point| Some(f64::from(point.order?) / point.predicted));
    let ratios: Vec<f64> = rows.iter().filter_map(ratio).collect();
    let (low, high) = ratios.iter().fold((f64::INFINITY, 0.0f64), |(low, high), &x| (low.min(x), high.max(x)));
    let inside = ratios.len() == rows.len() && low >= RATIO.0 && high <= RATIO.1;
    let verdict = if inside { Verdict::Reproduced } else { Verdict::Inconclusive };
    let stated = format!("at the largest n every order is {} to {} times ln n / ln(1 + a₁)", RATIO.0, RATIO.1);
    decided("orders grow like ln n / ln(1 + a₁)", stated, verdict, format!("{low:.2} to {high:.2} times"))
}
