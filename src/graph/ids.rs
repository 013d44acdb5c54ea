//! What inputs and persistent values are called: a name, and of which batch, what of a parameter or what beside it a value
//! is. Text only where people and files read it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Which of the optimiser's values beside a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Slot {
    /// Mean of the gradients.
    M,
    /// Mean of their squares.
    V,
    /// Sum of their squares, one number a row.
    Acc,
}

impl Slot {
    /// Its name in files.
    pub fn name(self) -> &'static str {
        match self {
            Slot::M => "m",
            Slot::V => "v",
            Slot::Acc => "acc",
        }
    }

    /// Whether it is one number for a whole row of a table.
    pub fn is_by_row(self) -> bool {
        self == Slot::Acc
    }

    /// Elements beside a table, or a part of one.
    pub fn len(self, rows: usize, width: usize) -> usize {
        if self.is_by_row() { rows } else { rows * width }
    }
}

/// A persistent value. Graphs share it where they name it alike.
///
/// As text: `head.w0`, `head.w0#m`, of a part of a table `embeddings.0@0..8#acc`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StateId {
    /// The parameter, or a value that belongs to none.
    pub name: Arc<str>,
    /// The columns that lie here of a table whose parts lie on several ranks.
    pub columns: Option<Range<usize>>,
    /// Which of the optimiser's values; `None`: the parameter itself.
    pub slot: Option<Slot>,
}

impl StateId {
    /// The optimiser's value beside this parameter, or this part of one.
    pub fn beside(&self, slot: Slot) -> StateId {
        StateId { slot: Some(slot), ..self.clone() }
    }

    /// The part of a table with these columns.
    pub fn part(&self, columns: Range<usize>) -> StateId {
        StateId { columns: Some(columns), ..self.clone() }
    }
}

impl fmt::Display for StateId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if let Some(c) = &self.columns {
            write!(f, "@{}..{}", c.start, c.end)?;
        }
        self.slot.map_or(Ok(()), |s| write!(f, "#{}", s.name()))
    }
}

/// A parameter's, or a value's that belongs to none. The name is not taken apart.
impl<T: AsRef<str> + ?Sized> From<&T> for StateId {
    fn from(name: &T) -> Self {
        StateId { name: name.as_ref().into(), columns: None, slot: None }
    }
}

impl From<String> for StateId {
    fn from(name: String) -> Self {
        StateId::from(&name)
    }
}

impl From<&StateId> for StateId {
    fn from(id: &StateId) -> Self {
        id.clone()
    }
}

/// A value that is uploaded before each step.
///
/// As text: `numeric`, of one of several batches `numeric@1`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InputId {
    /// What it is.
    pub name: Arc<str>,
    /// Of which of the batches that a step is made of, where it says so.
    pub part: Option<usize>,
}

impl InputId {
    /// The same of one of several batches.
    pub fn of_part(&self, part: usize) -> InputId {
        InputId { part: Some(part), ..self.clone() }
    }
}

impl fmt::Display for InputId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.part.map_or(Ok(()), |p| write!(f, "@{p}"))
    }
}

/// An input of the only batch.
impl<T: AsRef<str> + ?Sized> From<&T> for InputId {
    fn from(name: &T) -> Self {
        InputId { name: name.as_ref().into(), part: None }
    }
}

impl From<&InputId> for InputId {
    fn from(id: &InputId) -> Self {
        id.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_what_checkpoints_and_messages_say() {
        let w = StateId::from("head.w0");
        assert_eq!(w.to_string(), "head.w0");
        assert_eq!(w.beside(Slot::M).to_string(), "head.w0#m");
        let t = StateId::from("embeddings.0").part(0..8);
        assert_eq!(t.to_string(), "embeddings.0@0..8");
        assert_eq!(t.beside(Slot::Acc).to_string(), "embeddings.0@0..8#acc");
        assert_ne!(StateId::from("head.w0#m"), w.beside(Slot::M), "names are not taken apart");
        assert_eq!(InputId::from("numeric").of_part(1).to_string(), "numeric@1");
        assert_eq!([Slot::V, Slot::Acc].map(|s| s.len(5, 3)), [15, 5]);
    }
}
