//! The content of a reply behind its head, by its kind.

use dray_core::{AtOpen, Attr, Entry, FileId, Lock, Statfs, Xflags};

use crate::wire::codec::{Input, Wire};

macro_rules! results {
    ($($(#[$doc:meta])* $name:ident($type:ty)),* $(,)?) => {
        /// The results of a call.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Results {
            $($(#[$doc])* $name($type),)*
            /// The results as they were encoded before, of a reply that is sent once more.
            Encoded(Vec<u8>),
        }

        $(impl From<$type> for Results {
            fn from(value: $type) -> Results {
                Results::$name(value)
            }
        })*

        impl Results {
            /// Appends them.
            pub fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $(Results::$name(value) => value.put(out),)*
                    Results::Encoded(bytes) => out.extend_from_slice(bytes),
                }
            }
        }
    };
}

results! {
    /// The operation was done.
    Done(()),
    /// A file and its attributes.
    Entry(Entry),
    /// A file, and of a lookup whether it is open, of a creation whether it has no capability.
    FlaggedEntry((Entry, bool)),
    /// Attributes.
    Attr(Attr),
    /// A file.
    File(FileId),
    /// The attributes that came with an opening, if the client wants them.
    Opened(Option<AtOpen>),
    /// Space.
    Statfs(Statfs),
    /// A target, a value or a list of names.
    Bytes(Vec<u8>),
    /// A number of bytes, or flags.
    Number(u32),
    /// An offset, or a number of bytes.
    Offset(u64),
    /// The lock that stands in the way.
    Lock(Option<Lock>),
    /// Extended flags.
    Xflags(Xflags),
}

impl Results {
    /// The file that they begin with; of what begins with none it says nothing.
    pub fn file(&self) -> Option<FileId> {
        match self {
            Results::Entry(entry) | Results::FlaggedEntry((entry, _)) => Some(entry.id),
            Results::File(id) => Some(*id),
            Results::Encoded(bytes) => Input(bytes).get().ok(),
            Results::Done(())
            | Results::Attr(_)
            | Results::Opened(_)
            | Results::Statfs(_)
            | Results::Bytes(_)
            | Results::Number(_)
            | Results::Offset(_)
            | Results::Lock(_)
            | Results::Xflags(_) => None,
        }
    }
}
