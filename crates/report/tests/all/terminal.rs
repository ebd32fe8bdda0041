//! Documents in the terminal.

use crate::sample;

use termwise_report::{Block, Cell, Document, Section, Table, Terminal, Tone};
use unicode_width::UnicodeWidthStr;

fn small() -> Document {
    let mut table = Table::new("Loss, by `variant`", ["variant", "held-out loss", "state"]);
    table.rows.push(vec![Cell::code("exp over=sum norm=l2"), Cell::Number(2.5, 2), Cell::Empty]);
    table.rows.push(vec![Cell::text("taylor=0..4"), Cell::Number(12.25, 2), Cell::Count(139_425)]);
    Document {
        title: "Seen".into(),
        lead: vec![
            Block::text("All of **it** is from `this machine`, see [the paper](https://example.org/x) and [below](#a)."),
            Block::badge(Tone::Good, "reproduced", "loss falls"),
            Block::badge(Tone::Bad, "contradicted", "and rises again with every further order"),
        ],
        sections: vec![
            Section::new("Numbers", vec![Block::table("loss", table)]),
            Section::new(
                "More",
                vec![
                    Block::Facts(vec![
                        ("expression".into(), "exp over=sum".into()),
                        ("to know".into(), "a long text that has to be broken".into()),
                    ]),
                    Block::List(vec!["one".into(), "two".into()]),
                    Block::Code("termwise train --steps 5\n".into()),
                    Block::Details { summary: "All runs".into(), blocks: vec![Block::text("hidden")] },
                ],
            ),
        ],
    }
}

#[test]
fn documents_are_wrapped_to_the_terminal() {
    let expected = "\
Seen
════
All of it is from `this machine`, see
the paper (https://example.org/x) and
below.

✓ reproduced: loss falls
✗ contradicted: and rises again with
  every further order

Numbers
───────
Loss, by `variant`

                       held-out
variant                    loss    state
────────────────────  ─────────  ───────
exp over=sum norm=l2       2.50        –
taylor=0..4               12.25  139,425

More
────
expression  exp over=sum
to know     a long text that has to be
            broken

· one
· two

  termwise train --steps 5

▸ All runs (print it with `--details`)
";
    let terminal = Terminal { width: 40, ..Terminal::default() };
    assert_eq!(small().to_terminal(&terminal), expected);
    let all = small().to_terminal(&Terminal { details: true, ..terminal });
    assert!(all.contains("▾ All runs\n\nhidden\n"), "{all}");
}

/// Removes colour escape sequences, from the escape character to `m`.
fn without_colours(text: &str) -> String {
    let mut parts = text.split('\x1b');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.split_once('m').expect("a colour").1)
}

#[test]
fn colours_do_not_change_the_text() {
    for document in [small(), sample::page()] {
        for width in [30, 80, 120] {
            let plain = Terminal { width, color: false, details: true };
            let coloured = document.to_terminal(&Terminal { color: true, ..plain });
            assert!(coloured.contains("\x1b[1m") && coloured.contains("\x1b[32m✓"));
            assert_eq!(without_colours(&coloured), document.to_terminal(&plain));
        }
    }
}

#[test]
fn lines_fit_the_terminal_and_have_no_control_characters() {
    let evil = "\u{1b}[31m\u{7}a\u{202e}b\rc\u{9b}d</script>";
    let long = "x".repeat(500);
    let wide = "漢".repeat(100);
    let mut table = Table::new(format!("{evil} {long}"), [evil, &long, &wide, "n", "n", "n", "n", "n", "n", "n", "n", "n"]);
    for text in [evil, &long, &wide, ""] {
        let numbers = std::iter::repeat_n(Cell::Number(1.5e10, 3), 9);
        table.rows.push([Cell::text(text), Cell::code(text), Cell::Link(text.into(), "#a".into())].into_iter().chain(numbers).collect());
    }
    let texts = [evil, &long, &wide].map(str::to_owned);
    let blocks = vec![
        Block::List(texts.to_vec()),
        Block::Facts(texts.iter().map(|text| (text.clone(), text.clone())).collect()),
        Block::table(evil, table),
        Block::badge(Tone::Open, evil, &long),
        Block::Code(evil.into()),
        Block::Details { summary: long.clone(), blocks: vec![Block::text(evil)] },
    ];
    let document = Document { title: evil.into(), lead: blocks.clone(), sections: vec![Section::new(long.clone(), blocks)] };
    for width in [20, 40, 80, 120] {
        let text = document.to_terminal(&Terminal { width, color: false, details: true });
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()) && !text.contains('\u{202e}'), "{text:?}");
        for line in text.lines() {
            assert!(line.width() <= width && line.trim_end() == line, "{} of {width}: {line}", line.width());
        }
        // No text is lost: all letters of a broken word are present wherever it is shown.
        assert!(text.matches('漢').count() >= 2 * (100 * 6), "{}", text.matches('漢').count());
    }
    assert_eq!(Document::default().to_terminal(&Terminal::default()), "");
    assert_eq!(Table::default().to_text(80), "");
}

#[test]
fn columns_that_do_not_fit_are_stacked_with_the_first_repeated() {
    let mut table = Table::new("", ["layer", "alpha", "beta", "gamma"]);
    table.rows.push(vec![Cell::Count(1), Cell::Count(1_000_000), Cell::Count(2_000_000), Cell::Count(3_000_000)]);
    let expected = "layer      alpha       beta\n─────  ─────────  ─────────\n    1  1,000,000  2,000,000\n\n\
                    layer      gamma\n─────  ─────────\n    1  3,000,000\n";
    assert_eq!(table.to_text(30), expected);
}

#[test]
fn the_beginning_of_a_document_never_ends_with_the_caption_of_a_table() {
    let mut table = Table::new("A caption", ["layer", "order"]);
    table.rows = (0..20).map(|layer| vec![Cell::Count(layer), Cell::Count(2)]).collect();
    for before in 1..40 {
        let blocks = vec![Block::Code("line\n".repeat(before)), Block::text("An answer."), Block::table("layers", table.clone())];
        let document = Document { title: String::new(), lead: blocks, sections: Vec::new() };
        let (brief, left_out) = document.to_terminal_brief(&Terminal::default());
        let last = brief.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
        assert!(left_out > 0 && brief.lines().count() < 25, "{before}: {brief}");
        assert!(!last.contains("caption") && !last.contains("layer") && !last.contains('─'), "{before}: {brief}");
        // As many rows as fit are printed if there is any.
        let rows = brief.lines().filter(|line| line.trim_end().ends_with("  2")).count();
        assert_eq!(rows, 24_usize.saturating_sub(before + 7), "{before}: {brief}");
    }
}
