//! What a server needs of a backend beside [`FileSystem`]. It is how a backend is configured, found
//! and opened, and what the server asks of it while it is served.
//!
//! A [`BackendKind`] takes the options of an export, and gives a [`BackendSource`]. The source looks for
//! the files to be served, and looks again as long as they are [`UnavailableReason`]. A source that succeeds
//! gives a [`FoundBackend`]. The server compares it with the recorded identity of the export, and opens
//! it: that gives the [`Backend`].

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dray_core::{FileId, FileSystem, FsUuid, Fut, OnOutsideChanges, Result, UpperLeases};

pub use crate::posix::{DescriptorStore, Difference, ExportLocation, FsIdentity, OnDeath, Squash};

/// A kind of backend, by its name in configurations. [`KINDS`](crate::KINDS) lists those of this crate;
/// a server may have further ones.
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
    /// The name by which clients ask for it.
    pub name: &'a str,
    /// The directory of the export, as the administrator named it. For a kind without directories,
    /// the name that is shown.
    pub dir: &'a Path,
    /// Changes are refused.
    pub read_only: bool,
    /// Clients of the export may have leases.
    pub leases: bool,
    /// Which identities are replaced.
    pub squash: Squash,
    /// The kind's own options; an option without a value, or with the value true, is `yes`.
    pub own: &'a BTreeMap<String, String>,
}

/// An option of an export that has a wrong value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongOption {
    /// What is wrong, for people; a sentence without its end.
    pub what: String,
    /// The value.
    pub value: String,
    /// Words that the administrator may have meant.
    pub known: &'static [&'static str],
}

impl WrongOption {
    /// `option` can be `choices` (in words), one of the words in `known` among them.
    pub fn new(
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
    pub fn get(&self, option: &str) -> Option<&str> {
        self.own.get(option).map(String::as_str)
    }

    /// For backends that believe a client's word about its callers. A client's root is root there.
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

    /// The value of an option that is on or off.
    pub(crate) fn switch(&self, option: &str) -> std::result::Result<bool, WrongOption> {
        match self.get(option) {
            None | Some("no") => Ok(false),
            Some("yes") => Ok(true),
            Some(word) => Err(WrongOption::new(option, "yes or no", word, &["yes", "no"])),
        }
    }

    /// The value of an option that is a number from `least` to `most`.
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

/// The recorded identity of an export.
#[derive(Clone, Copy, Debug)]
pub struct NotedIdentity<'a> {
    /// The file system, and the directory of it.
    pub identity: &'a FsIdentity,
    /// The machine has not been started since.
    pub same_boot: bool,
}

/// The configured place of the files of an export, whether they are there or not.
pub trait BackendSource: Send + Sync + fmt::Debug {
    /// Looks for the files to be served. May wait for the file system below. `noted`: the recorded
    /// identity, as far as the name of the directory finds one.
    fn find(
        &self,
        noted: Option<NotedIdentity<'_>>,
    ) -> std::result::Result<Box<dyn FoundBackend>, UnavailableReason>;

    /// Why it cannot be served, after [`OnDeath`] was notified during the opening.
    fn died(&self, noted: Option<NotedIdentity<'_>>) -> UnavailableReason;
}

/// Why there are no files to serve. Sentences for people without their beginnings and ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnavailableReason {
    /// Something is wrong.
    Wrong(String),
    /// The files are not there, and are waited for.
    Awaited {
        /// The obstacle, and what to do.
        why: String,
        /// What the server waits for.
        expected: String,
        /// What is there instead.
        found: String,
    },
}

/// The files to be served, found and not opened yet.
pub trait FoundBackend {
    /// The backend's directory without links. For a kind without directories, the name that is
    /// shown.
    fn dir(&self) -> &Path;

    /// The file system's identity, to be recorded and compared with the recorded one. None: it ends
    /// with the server, and the next one is another.
    fn identity(&self) -> Option<&FsIdentity>;

    /// How it differs from the recorded identity; none if it does not.
    fn difference(&self, noted: NotedIdentity<'_>) -> Option<Difference>;

    /// The secret that signs ids of files at every server that serves this directory. It is kept with
    /// the directory, where clients do not see it, and made by the first who asks. None: the file system has
    /// no place for it. Errors: it cannot be kept, in words for people.
    fn shared_id_key(&self) -> std::result::Result<Option<u128>, String>;

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
    /// Other servers serve the same directory, and their ids have to be the same.
    pub shared_ids: bool,
    /// A file of the backend's own in the state directory, for data that must outlive the server.
    /// It need not exist.
    pub state_file: PathBuf,
    /// Keeps deleted files that are open when the server dies; none: they end with the server.
    pub descriptor_store: Option<Arc<dyn DescriptorStore>>,
    /// Deleted files that are open are kept in the files' own file system, where another server finds them.
    /// A backend without such servers has no use for it.
    pub keeps_removed: bool,
    /// Descriptors for files open at clients.
    pub open_descriptors_max: usize,
    /// Descriptors for inodes used lately.
    pub inode_cache_max: usize,
    /// Is notified when the file system below has died.
    pub on_death: Arc<dyn OnDeath>,
}

/// A file system that a server serves as an export.
pub trait Backend: FileSystem {
    /// The guarantees that this file system does not give, for the administrator: sentences without
    /// their ends.
    fn caveats(&self) -> Vec<String>;

    /// Whether its ids of files follow from what the file system below says of them. Each server of that file
    /// system has the same ids then, given the same key ([`FoundBackend::shared_id_key`]).
    fn has_shared_ids(&self) -> bool;

    /// Whether a call has been in the file system below for `least` or longer. Never waits for the file
    /// system.
    fn hang(&self, least: Duration) -> Option<Hang>;

    /// Upkeep of an idle export, done now and then, such as closing descriptors that were not used
    /// for a while. If it hangs, only the upkeep of this export waits.
    fn upkeep(&self) -> Fut<'_, ()>;

    /// Where the path `dir`, without links, leads now.
    fn location<'a>(&'a self, dir: &'a Path) -> Fut<'a, ExportLocation>;

    /// Whether the file system below can die while it is served, as that of a program can.
    fn is_mortal(&self) -> bool;

    /// Whether it has died, and has to be opened anew. Asked of mortal ones only, and may hang.
    fn is_dead(&self) -> Fut<'_, bool>;

    /// Which servers below do not answer, and why, in words for people; none if all do, or if this is
    /// no client of servers. Never waits.
    fn servers_away(&self) -> Option<String>;

    /// Each client that had files open or locked before the start of the server has reopened these, or
    /// its session has ended. What a process before this one left below can be given back. May be called
    /// more than once.
    fn recovered(&self);

    /// Before clients of another server of the same files come here: looks for removed files that the other
    /// one has kept for them ([`BackendResources::keeps_removed`]). Errors: those of the file system below.
    fn find_removed(&self) -> Result<()>;

    /// When those clients have come back, or cannot any more: removes what was kept of their files
    /// (`are_ours`) and is not open here.
    fn forget_removed(&self, are_ours: &dyn Fn(FileId) -> bool);

    /// From now on `on_changes` is notified of changes outside dray, until the backend is left or dropped. Nothing is
    /// reported where an administrator has not asked for it. Errors: why nothing is, though it was asked for, in words
    /// for people.
    fn watch_outside(
        &self,
        on_changes: Arc<dyn OnOutsideChanges>,
    ) -> std::result::Result<(), String>;

    /// Why changes outside dray are not reported, in words for people; none: they are.
    fn outside_unnoticed(&self) -> Option<String>;

    /// What servers above lease to it, if it is their client, and its export leases. Nothing else may be leased then.
    fn upper_leases(&self) -> Option<Arc<dyn UpperLeases>>;

    /// This backend is about to be dropped, and clients will open their files again in its
    /// successor.
    fn leave(&self);
}

/// A file system below that does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hang {
    /// Calls in the file system below, and calls that wait for a thread behind them.
    pub calls: usize,
    /// How long the first of them has been in it at least.
    pub since: Duration,
}
