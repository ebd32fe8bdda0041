//! The loss of the best possible predictor, as derived in the documentation of the module.

use super::LanguageConfig;
use super::document::word_probabilities;
use crate::BestLoss;

/// Expected losses and expected numbers of tokens, position by position.
pub(super) fn best_loss(config: &LanguageConfig) -> BestLoss {
    let (facts, statements) = (config.facts, config.statements());
    let (alpha, beta) = (config.fact_rate, config.question_rate);
    let word = entropy(&word_probabilities(config.branching));
    let ln = |n: usize| (n as f64).ln();
    // Keys that a statement can be about: those not named yet, then those named once.
    let open = |f: usize| if f < facts { config.keys - f } else { 2 * facts - f };
    let stating: Vec<f64> = (0..statements).map(|f| entropy(&[alpha, 1.0 - alpha]) + alpha * ln(open(f)) + (1.0 - alpha) * word).collect();
    let asking = entropy(&[beta, 1.0 - beta]) + (1.0 - beta) * word;

    // Probabilities of: the end of a phrase after f statements; after the key of statement f; g words after the last one, before the first
    // question; after `?`; after the key of a question.
    let mut end = vec![0.0; statements + 1];
    let mut value = vec![0.0; statements];
    let mut between = vec![0.0; config.gap];
    let (mut question, mut answer) = (0.0, 0.0);
    end[0] = 1.0;
    let (mut loss, mut answers, mut counted) = (0.0, 0.0, 0.0);
    for _ in 0..config.length {
        answers += answer;
        counted += 1.0 - question;
        loss += end.iter().zip(&stating).map(|(p, loss)| p * loss).sum::<f64>()
            + value.iter().sum::<f64>() * ln(config.values)
            + between.iter().sum::<f64>() * word
            + end[statements] * asking;
        let queried = end[statements] * beta;
        end[statements] += answer - queried;
        (question, answer) = (queried, question);
        if let Some(last) = between.last().copied() {
            end[statements] += last;
            between.rotate_right(1);
            between[0] = 0.0;
        }
        for f in (0..statements).rev() {
            match between.first_mut().filter(|_| f + 1 == statements) {
                Some(first) => *first = value[f],
                None => end[f + 1] += value[f],
            }
            value[f] = end[f] * alpha;
            end[f] -= value[f];
        }
    }
    BestLoss { all: loss / counted, recall: 0.0, rest: loss / (counted - answers) }
}

/// −Σ p·ln p
fn entropy(probabilities: &[f64]) -> f64 {
    -probabilities.iter().filter(|&&p| p > 0.0).map(|p| p * p.ln()).sum::<f64>()
}
