//! Which build wrote a result, as it stands in files and on pages.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use termwise_report::Block;
use termwise_train::provenance::Provenance;

/// Which build wrote a result, where, and by which command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MadeBy {
    /// Version and commit of the program.
    pub build: String,
    /// The instruction set that it used.
    pub instructions: String,
    /// As the processor calls itself; empty where the system does not say.
    pub processor: String,
    /// The command line.
    pub command: String,
}

impl From<Provenance> for MadeBy {
    fn from(Provenance { build, instructions, processor, command }: Provenance) -> MadeBy {
        MadeBy { build: build.to_string(), instructions, processor, command }
    }
}

impl MadeBy {
    /// For the end of a page's lead.
    pub fn block(&self) -> Block {
        let MadeBy { build, instructions, processor, command } = self;
        Block::Text(format!("Made by termwise {build}, {instructions} on {processor}: `{command}`"))
    }
}
