//! Data that the program makes up itself.

use crate::error::Result;
use crate::language::Language;
use crate::parity::Parity;
use crate::{BestLoss, Rows, Source, Tokenizer};

/// Built-in data, by its name among the settings.
#[derive(Debug)]
pub enum Builtin {
    /// `builtin`: documents that state facts and ask for them.
    Language(Language),
    /// `builtin:parity`: bits and their parity.
    Parity(Parity),
}

impl Builtin {
    /// What its names begin with.
    pub const NAME: &str = "builtin";
    /// All names.
    pub const NAMES: [&str; 2] = [Builtin::NAME, "builtin:parity"];

    /// The data of this name with these dials; `None` where it is no name of built-in data.
    pub fn open(name: &str, dials: &str) -> Result<Option<Builtin>> {
        Ok(match Builtin::NAMES.iter().position(|known| *known == name) {
            Some(0) => Some(Builtin::Language(Language::new(dials.parse()?)?)),
            Some(_) => Some(Builtin::Parity(Parity::new(dials.parse()?))),
            None => None,
        })
    }

    fn source(&self) -> &dyn Source {
        match self {
            Builtin::Language(language) => language,
            Builtin::Parity(parity) => parity,
        }
    }

    /// Its `tokenizer.json`.
    pub fn tokenizer_json(&self) -> Vec<u8> {
        match self {
            Builtin::Language(language) => language.tokenizer_json(),
            Builtin::Parity(parity) => parity.tokenizer_json(),
        }
    }

    /// The tokenizer of that file.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::of_json("the built-in data", &self.tokenizer_json(), None)
    }

    /// Positions of a document; absent where they have no end.
    pub fn document(&self) -> Option<usize> {
        match self {
            Builtin::Language(language) => Some(language.config().length),
            Builtin::Parity(_) => None,
        }
    }
}

impl Source for Builtin {
    fn vocabulary(&self) -> usize {
        self.source().vocabulary()
    }

    fn fingerprint(&self) -> String {
        self.source().fingerprint()
    }

    fn train(&self, seed: u64, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<()> {
        self.source().train(seed, index, rows, time, out)
    }

    fn held_out(&self, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<bool> {
        self.source().held_out(index, rows, time, out)
    }

    fn best_loss(&self) -> Option<BestLoss> {
        self.source().best_loss()
    }
}
