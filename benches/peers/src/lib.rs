//! The collective layer by itself, from the project's own files: it needs nothing else of the engine, so this builds in
//! seconds.

#[path = "../../../src/collective/mod.rs"]
pub mod collective;
#[path = "../../../src/sync.rs"]
mod sync;
#[allow(dead_code)]
#[path = "../../../src/text.rs"]
mod text;
