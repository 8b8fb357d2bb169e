//! What a server needs of a backend beside [`FileSystem`]: how it is configured, found and opened, and
//! what is asked of it while it is served.
//!
//! A [`BackendKind`] takes the options of an export, and answers a [`BackendSource`]. The source looks for
//! what is to be served, as often as that is not there ([`Unavailable`]). What it has found, a
//! [`FoundBackend`], is compared with what the export was made on, and opened: that is the [`Backend`].

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dray_core::{FileSystem, FsUuid, Fut, Result};

pub use crate::posix::{
    Difference, Keeper as DescriptorStore, OnDeath, Origin as FsIdentity, Place as ExportLocation,
    Squash,
};

/// A kind of backend, by the name that configurations have for it. Those that there are:
/// [`KINDS`](crate::KINDS).
pub trait BackendKind: Send + Sync + fmt::Debug {
    /// As in `backend = "posix"`.
    fn name(&self) -> &'static str;

    /// Whether an export of this kind is a directory of the server's machine, which has to be named.
    fn has_directory(&self) -> bool;

    /// The options that exports of this kind have beside those of all exports.
    fn options(&self) -> &'static [&'static str];

    /// Takes the options of an export. Touches no file system. Errors: an option has a wrong value.
    fn configure(
        &self,
        settings: &ExportSettings<'_>,
    ) -> std::result::Result<Arc<dyn BackendSource>, WrongOption>;
}

/// What an administrator has said of an export.
#[derive(Clone, Copy, Debug)]
pub struct ExportSettings<'a> {
    /// Its directory, as it was named; of a kind without directories what it is shown as.
    pub dir: &'a Path,
    /// Changes are refused.
    pub read_only: bool,
    /// Whose identity is replaced.
    pub squash: Squash,
    /// The kind's own options; an option without a value, or with the value true, is `yes`.
    pub own: &'a BTreeMap<String, String>,
}

/// An option of an export that has a wrong value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongOption {
    /// What is wrong, for people; without its end.
    pub what: String,
    /// The value.
    pub value: String,
    /// Words that it may have been meant for.
    pub known: &'static [&'static str],
}

impl WrongOption {
    /// `option` can be `choices` (in words), one of the words in `known` among them.
    pub(crate) fn new(
        option: &str,
        choices: &str,
        value: &str,
        known: &'static [&'static str],
    ) -> WrongOption {
        let what = format!("{option} is {choices}, not `{value}`");
        WrongOption { what, value: value.to_owned(), known }
    }
}

impl ExportSettings<'_> {
    /// The value of an option of the kind's own.
    pub(crate) fn get(&self, option: &str) -> Option<&str> {
        self.own.get(option).map(String::as_str)
    }

    /// For kinds that take every caller for who the client says. Root of a client is root there.
    pub(crate) fn no_squash(&self, kind: &str) -> std::result::Result<(), WrongOption> {
        match self.squash {
            Squash::None => Ok(()),
            Squash::Root(..) | Squash::All(..) => Err(WrongOption {
                what: format!("the backend {kind} replaces no identities: say squash none"),
                value: String::new(),
                known: &[],
            }),
        }
    }

    /// The same of an option that is on or off.
    pub(crate) fn switch(&self, option: &str) -> std::result::Result<bool, WrongOption> {
        match self.get(option) {
            None | Some("no") => Ok(false),
            Some("yes") => Ok(true),
            Some(word) => Err(WrongOption::new(option, "yes or no", word, &["yes", "no"])),
        }
    }

    /// The same of a number from `least` to `most`.
    pub(crate) fn number(
        &self,
        option: &str,
        (least, most): (u64, u64),
    ) -> std::result::Result<Option<u64>, WrongOption> {
        let Some(text) = self.get(option) else { return Ok(None) };
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        let choices = || match least {
            0 => format!("a number up to {most}"),
            _ => format!("a number from {least} to {most}"),
        };
        number.map(Some).ok_or_else(|| WrongOption::new(option, &choices(), text, &[]))
    }
}

/// What an export was made on, as the server has noted it.
#[derive(Clone, Copy, Debug)]
pub struct NotedIdentity<'a> {
    /// The file system, and the directory of it.
    pub identity: &'a FsIdentity,
    /// The machine has not been started since.
    pub same_boot: bool,
}

/// Where the files of an export are, by its configuration. They may be there or not.
pub trait BackendSource: Send + Sync + fmt::Debug {
    /// Looks for what is to be served; may wait for the file system below. `noted`: what the export was
    /// made on, as far as that is known by the name of its directory.
    fn find(
        &self,
        noted: Option<NotedIdentity<'_>>,
    ) -> std::result::Result<Box<dyn FoundBackend>, Unavailable>;

    /// Why it cannot be served, now that [`OnDeath`] was told while it was opened.
    fn died(&self, noted: Option<NotedIdentity<'_>>) -> Unavailable;
}

/// Why there is nothing that could be served. Sentences for people without their beginnings and ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unavailable {
    /// Something is wrong.
    Wrong(String),
    /// What is to be served is not there, and is waited for.
    Awaited {
        /// What is in the way, and what to do.
        why: String,
        /// What is waited for.
        expected: String,
        /// What is there instead.
        found: String,
    },
}

/// What is to be served, found and not opened.
pub trait FoundBackend {
    /// Its directory without links; of a kind without directories what it is shown as.
    fn dir(&self) -> &Path;

    /// What it is, to be noted and compared with what the export was made on. None: it ends with the
    /// server, and the next one is another.
    fn identity(&self) -> Option<&FsIdentity>;

    /// How it differs from what was `noted`; none: it does not.
    fn difference(&self, noted: NotedIdentity<'_>) -> Option<Difference>;

    /// Opens it. Errors: those of the file system below.
    fn open(self: Box<Self>, resources: BackendResources) -> Result<Arc<dyn Backend>>;
}

/// What a server gives a backend that it opens.
#[derive(Clone, Debug)]
pub struct BackendResources {
    /// Identity of the export's file system.
    pub uuid: FsUuid,
    /// Secret that signs ids of files; as lasting as `uuid`.
    pub id_key: u128,
    /// A file of the backend's own in the state directory, for what must outlive the server. It need
    /// not exist.
    pub state_file: PathBuf,
    /// Keeps files that were deleted while they are open over the death of the server; none: they end
    /// with the server.
    pub descriptor_store: Option<Arc<dyn DescriptorStore>>,
    /// Descriptors for files open at clients.
    pub open_descriptors_max: usize,
    /// Descriptors for inodes used lately.
    pub inode_cache_max: usize,
    /// To be told when the file system below has died.
    pub on_death: Arc<dyn OnDeath>,
}

/// A file system that a server serves as an export.
pub trait Backend: FileSystem {
    /// What does not hold on this file system, for whoever runs the server: sentences without their
    /// ends.
    fn caveats(&self) -> Vec<String>;

    /// Whether a call has been in the file system below for `least` or longer. Never waits for the file
    /// system.
    fn hang(&self, least: Duration) -> Option<Hang>;

    /// What is to be done now and then while the export rests, such as closing descriptors that nobody
    /// has used for a while. One that hangs keeps the upkeep of this export alone waiting.
    fn upkeep(&self) -> Fut<'_, ()>;

    /// What the directory `dir`, without links, leads to now.
    fn location<'a>(&'a self, dir: &'a Path) -> Fut<'a, ExportLocation>;

    /// Whether the file system below can die while it is served, as that of a program can.
    fn is_mortal(&self) -> bool;

    /// Whether it has died, and is to be opened anew. Asked of mortal ones only, and may hang.
    fn is_dead(&self) -> Fut<'_, bool>;

    /// It is about to be dropped, and clients will open their files again in what takes its place.
    fn leave(&self);
}

/// A file system below that does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hang {
    /// Calls that are in it, and those that wait for a thread behind them.
    pub calls: usize,
    /// How long the first of them has been in it at least.
    pub since: Duration,
}
