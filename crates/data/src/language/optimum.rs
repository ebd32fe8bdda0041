//! The loss of the best possible predictor; the module of the language says why.

use super::LanguageConfig;
use super::document::word_probabilities;
use crate::BestLoss;

/// Expected losses and expected numbers of tokens, position by position.
pub(super) fn best_loss(config: &LanguageConfig) -> BestLoss {
    let facts = config.facts;
    let (alpha, beta) = (config.fact_rate, config.question_rate);
    let word = entropy(&word_probabilities(config.branching));
    let ln = |n: usize| (n as f64).ln();
    let stating: Vec<f64> =
        (0..facts).map(|f| entropy(&[alpha, 1.0 - alpha]) + alpha * ln(config.keys - f) + (1.0 - alpha) * word).collect();
    let asking = entropy(&[beta, 1.0 - beta]) + (1.0 - beta) * word;

    // Probabilities of: the end of a phrase with f facts stated; after the key of fact f; after `?`; after the key of a question.
    let mut end = vec![0.0; facts + 1];
    let mut value = vec![0.0; facts];
    let (mut question, mut answer) = (0.0, 0.0);
    end[0] = 1.0;
    let (mut loss, mut answers, mut counted) = (0.0, 0.0, 0.0);
    for _ in 0..config.length {
        answers += answer;
        counted += 1.0 - question;
        loss += end.iter().zip(&stating).map(|(p, loss)| p * loss).sum::<f64>()
            + value.iter().sum::<f64>() * ln(config.values)
            + end[facts] * asking;
        let asked = end[facts] * beta;
        end[facts] += answer - asked;
        (question, answer) = (asked, question);
        for f in (0..facts).rev() {
            end[f + 1] += value[f];
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
