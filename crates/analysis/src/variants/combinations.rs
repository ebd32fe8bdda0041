//! The table of combinations: which parts can be combined, and why others are rejected.

use termwise_attention::variant::combinations::{BASE_KERNELS, SLOT_VALUES, SlotValue, accepted, combine};
use termwise_report::{Block, Cell, Document, Section, Table};

/// The matrix of all pairs of slot values, with the reasons of rejections.
pub fn combinations() -> Document {
    let mut reasons: Vec<String> = Vec::new();
    let columns = ["", "part"].map(String::from).into_iter().chain((1..=SLOT_VALUES.len()).map(|column| column.to_string()));
    let mut matrix = Table::new("", columns);
    for (row, first) in SLOT_VALUES.iter().enumerate() {
        let cells = SLOT_VALUES.iter().map(|second| match refusal(first, second) {
            _ if first.slot == second.slot => Cell::Empty,
            None => Cell::text("+"),
            Some(reason) => {
                let known = reasons.iter().position(|other| *other == reason);
                let index = known.unwrap_or_else(|| {
                    reasons.push(reason);
                    reasons.len() - 1
                });
                Cell::text(letter(index))
            }
        });
        matrix.rows.push([Cell::text((row + 1).to_string()), Cell::code(first.word)].into_iter().chain(cells).collect());
    }
    let reasons = reasons.iter().enumerate().map(|(index, reason)| format!("**{}**: {reason}", letter(index))).collect();
    let lead = "Every part of a row is combined with every part of a column, on top of softmax. A `+` marks a pair that works: the naive, \
        fused, chunked and recurrent engines agree, and gradients, variant strings and state files are tested. A letter marks a pair that is \
        refused at construction. Parts of one slot exclude each other.";
    let inference = "Heavy hitters (`chosen`) and quantized caches (`bits`) are inference-only: they have no gradients.";
    Document {
        title: "Combinations of parts".into(),
        lead: vec![Block::text(lead), Block::text(inference), Block::table("pairs", matrix)],
        sections: vec![Section::new("Reasons", vec![Block::List(reasons)])],
    }
}

/// Why a pair is rejected with the exponential kernel, or with its own.
fn refusal(first: &SlotValue, second: &SlotValue) -> Option<String> {
    accepted(&combine(first, second, BASE_KERNELS[0])).err()
}

fn letter(index: usize) -> String {
    char::from(b'a' + index as u8).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_matrix_is_symmetric_and_every_rejection_has_a_reason() {
        let page = combinations();
        let Some(Block::Table { table, .. }) = page.lead.last() else { panic!("a matrix") };
        assert_eq!(table.rows.len(), SLOT_VALUES.len());
        for row in 0..table.rows.len() {
            for column in 0..table.rows.len() {
                assert_eq!(table.rows[row][2 + column], table.rows[column][2 + row], "{row} {column}");
            }
        }
        let Block::List(reasons) = &page.sections[0].blocks[0] else { panic!("a list") };
        assert!((5..26).contains(&reasons.len()), "{}", reasons.len());
        let cell = |a: &str, b: &str| {
            let at = |word: &str| SLOT_VALUES.iter().position(|value| value.word == word).expect("a value");
            table.rows[at(a)][2 + at(b)].clone()
        };
        assert_eq!(cell("window=3", "conv=2"), Cell::text("+"));
        assert_eq!(cell("in", "in"), Cell::Empty);
        assert_ne!(cell("window=3", "write=delta,scale=0.5"), Cell::text("+"));
    }
}
