//! What a record is about, and sets of that.

use std::fmt;
use std::str::FromStr;

use dray_core::{CallDetail, MakeKind, ObservedCall, Op, RemoveKind};

macro_rules! kinds {
    ($($variant:ident $name:literal),* $(,)?) => {
        /// What a record is about. Numbers are part of the format on disk: new ones come at the end.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        #[allow(missing_docs)] // The names say it.
        pub enum AuditKind { $($variant),* }

        impl AuditKind {
            /// All of them, in the order of their numbers.
            pub const ALL: &'static [AuditKind] = &[$(AuditKind::$variant),*];

            /// The name in configurations, filters and output.
            pub fn name(self) -> &'static str {
                match self { $(AuditKind::$variant => $name),* }
            }
        }
    };
}

kinds! {
    Gap "gap",
    Start "start",
    Create "create",
    Mkdir "mkdir",
    Symlink "symlink",
    Mknod "mknod",
    Link "link",
    Unlink "unlink",
    Rmdir "rmdir",
    Rename "rename",
    Open "open",
    Close "close",
    Chmod "chmod",
    Chown "chown",
    Truncate "truncate",
    Times "times",
    Setxattr "setxattr",
    Removexattr "removexattr",
    Fallocate "fallocate",
    Copy "copy",
    Flags "flags",
    Lookup "lookup",
    Access "access",
    Read "read",
    Write "write",
    Readdir "readdir",
    Getattr "getattr",
    Readlink "readlink",
    Getxattr "getxattr",
    Listxattr "listxattr",
    Lock "lock",
    Other "other",
}

impl AuditKind {
    /// The kind of this number, of a file.
    pub fn of_number(number: u8) -> Option<AuditKind> {
        AuditKind::ALL.get(usize::from(number)).copied()
    }

    /// The kind of record that a call becomes.
    pub fn of(call: &ObservedCall<'_>) -> AuditKind {
        match call.op {
            Op::Create | Op::Tmpfile | Op::Put => AuditKind::Create,
            Op::Make => match call.detail {
                CallDetail::Make(MakeKind::Node) => AuditKind::Mknod,
                CallDetail::Make(MakeKind::Symlink) => AuditKind::Symlink,
                CallDetail::Make(MakeKind::Directory)
                | CallDetail::Nothing
                | CallDetail::Remove(_)
                | CallDetail::Set(_)
                | CallDetail::Xattr(_)
                | CallDetail::Closed(_) => AuditKind::Mkdir,
            },
            Op::Remove => match call.detail {
                CallDetail::Remove(RemoveKind::Directory) => AuditKind::Rmdir,
                CallDetail::Remove(RemoveKind::File)
                | CallDetail::Nothing
                | CallDetail::Make(_)
                | CallDetail::Set(_)
                | CallDetail::Xattr(_)
                | CallDetail::Closed(_) => AuditKind::Unlink,
            },
            Op::Rename => AuditKind::Rename,
            Op::Link => AuditKind::Link,
            Op::Open | Op::OpenNamed | Op::LookupOpen => AuditKind::Open,
            Op::Close => AuditKind::Close,
            Op::Setattr => AuditKind::of_set(call),
            Op::Setxattr => AuditKind::Setxattr,
            Op::Removexattr => AuditKind::Removexattr,
            Op::Allocate => AuditKind::Fallocate,
            Op::CopyRange => AuditKind::Copy,
            Op::SetFlags | Op::SetXflags => AuditKind::Flags,
            Op::Lookup | Op::Parent => AuditKind::Lookup,
            Op::Access => AuditKind::Access,
            Op::Read | Op::Seek => AuditKind::Read,
            Op::Write | Op::WriteBack => AuditKind::Write,
            Op::Readdir => AuditKind::Readdir,
            Op::Getattr | Op::GetFlags | Op::GetXflags => AuditKind::Getattr,
            Op::Readlink => AuditKind::Readlink,
            Op::Getxattr => AuditKind::Getxattr,
            Op::Listxattr => AuditKind::Listxattr,
            Op::Lock | Op::TestLock => AuditKind::Lock,
            Op::Statfs
            | Op::Flush
            | Op::Sync
            | Op::SyncAll
            | Op::Recover
            | Op::Redo
            | Op::Reopen
            | Op::Declare
            | Op::Learn
            | Op::Hold
            | Op::Release => AuditKind::Other,
        }
    }

    /// Of a call that sets several things, what matters most to rights comes first.
    fn of_set(call: &ObservedCall<'_>) -> AuditKind {
        let CallDetail::Set(set) = call.detail else { return AuditKind::Times };
        if set.uid.is_some() || set.gid.is_some() {
            AuditKind::Chown
        } else if set.mode.is_some() {
            AuditKind::Chmod
        } else if set.size.is_some() {
            AuditKind::Truncate
        } else {
            AuditKind::Times
        }
    }
}

impl fmt::Display for AuditKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindSet(u32);

const _: () = assert!(AuditKind::ALL.len() <= 32);

impl KindSet {
    /// None.
    pub const NONE: KindSet = KindSet(0);
    /// Every kind.
    pub const EVERY: KindSet = KindSet(u32::MAX);

    /// The kinds that an administrator can choose: changes, opens and closes. What is not chosen is
    /// recorded where it is denied.
    pub fn selectable() -> impl Iterator<Item = AuditKind> {
        let (first, last) = (AuditKind::Create as u8, AuditKind::Flags as u8);
        (first..=last).filter_map(AuditKind::of_number)
    }

    /// All that can be chosen.
    pub fn all() -> KindSet {
        KindSet::selectable().fold(KindSet::NONE, KindSet::with)
    }

    /// The set with `kind`.
    pub fn with(self, kind: AuditKind) -> KindSet {
        KindSet(self.0 | 1 << kind as u8)
    }

    /// Whether `kind` is in it.
    pub fn has(self, kind: AuditKind) -> bool {
        self.0 & 1 << kind as u8 != 0
    }

    /// The set of these names, as readers want it: with `gap` and `start`. `all` is everything else, `none` nothing,
    /// `change` all but opens and closes. Errors: a name that is not known.
    pub fn of_names<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<KindSet, UnknownKind> {
        let mut set = KindSet::NONE;
        for name in names {
            match name {
                "all" => set = KindSet(set.0 | KindSet::all().0),
                "none" | "denied" => {}
                "change" => {
                    let opens = 1 << AuditKind::Open as u8 | 1 << AuditKind::Close as u8;
                    set = KindSet(set.0 | KindSet::all().0 & !opens);
                }
                name => {
                    let kind = AuditKind::ALL.iter().copied().find(|kind| kind.name() == name);
                    set = set.with(kind.ok_or_else(|| UnknownKind(name.to_owned()))?);
                }
            }
        }
        Ok(set)
    }

    /// The names of these kinds.
    pub fn names(self) -> Vec<&'static str> {
        AuditKind::ALL.iter().filter(|kind| self.has(**kind)).map(|kind| kind.name()).collect()
    }
}

impl FromStr for KindSet {
    type Err = UnknownKind;

    /// Names separated by commas or plus signs, of what can be chosen.
    fn from_str(text: &str) -> Result<KindSet, UnknownKind> {
        let names = text.split([',', '+']).map(str::trim).filter(|name| !name.is_empty());
        let set = KindSet::of_names(names)?;
        match AuditKind::ALL.iter().find(|kind| set.has(**kind) && !KindSet::all().has(**kind)) {
            None => Ok(set),
            Some(own) => Err(UnknownKind(own.name().to_owned())),
        }
    }
}

/// A name that is no kind's.
#[derive(Debug, PartialEq, Eq)]
pub struct UnknownKind(pub String);

impl UnknownKind {
    /// All that there are.
    pub fn known() -> Vec<&'static str> {
        let groups = ["all", "change", "denied"];
        groups.into_iter().chain(KindSet::selectable().map(AuditKind::name)).collect()
    }
}

impl fmt::Display for UnknownKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = UnknownKind::known().join(", ");
        write!(f, "no kind of record is called `{}`; there are: {known}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_their_names_and_unknown_ones_are_refused_with_all_that_there_are() {
        for (number, kind) in AuditKind::ALL.iter().enumerate() {
            assert_eq!(AuditKind::of_number(number as u8), Some(*kind));
        }
        let set: KindSet = "create,unlink+close".parse().unwrap();
        assert_eq!(set.names(), ["create", "unlink", "close"]);
        assert!("all".parse::<KindSet>().unwrap().has(AuditKind::Open));
        assert!(!"change".parse::<KindSet>().unwrap().has(AuditKind::Open));
        let error = "create,opne".parse::<KindSet>().unwrap_err().to_string();
        assert!(error.contains("`opne`; there are: all, change, denied, create, mkdir"), "{error}");
        assert!("gap".parse::<KindSet>().is_err(), "gaps are always recorded");
        assert_eq!(KindSet::of_names(["gap", "start"]).unwrap().names(), ["gap", "start"]);
    }
}
