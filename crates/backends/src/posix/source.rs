//! The directory of an export by its path: whether it is there, and on which file system it has to be.
//! A directory that cannot be served is reported in words: what is expected, what was found, what to do.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use dray_core::Errno;

use super::kind::FoundDirectory;
use super::{Difference, PosixOptions, Root};
use crate::backend::{BackendSource, FoundBackend, NotedIdentity, UnavailableReason};

/// A directory that is to be served.
#[derive(Clone, Debug)]
pub(super) struct DirectorySource {
    /// As it was named.
    pub(super) named: PathBuf,
    /// Where a file system must be mounted, on which the directory is.
    pub(super) mountpoint: Option<PathBuf>,
    pub(super) options: PosixOptions,
}

impl BackendSource for DirectorySource {
    fn find(
        &self,
        noted: Option<NotedIdentity<'_>>,
    ) -> Result<Box<dyn FoundBackend>, UnavailableReason> {
        let found = std::fs::canonicalize(&self.named);
        let found = found.and_then(|dir| Ok((std::fs::metadata(&dir)?.is_dir(), dir)));
        let (is_dir, dir) = found.map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                self.missing(noted, &format!("{error}; make it first, or correct the path"))
            }
            ErrorKind::NotConnected => dead(&self.named, noted),
            _ => UnavailableReason::Wrong(error.to_string()),
        })?;
        if !is_dir {
            let what = "it is not a directory; name the directory that it is in";
            return Err(self.missing(noted, what));
        }
        let root = Root::open(&dir).map_err(|error| match error.errno() {
            Errno::ENOTCONN => dead(&dir, noted),
            _ => UnavailableReason::Wrong(error.to_string()),
        })?;
        self.check_mounted(&root)?;
        Ok(Box::new(FoundDirectory { dir, root, options: self.options.clone() }))
    }

    fn died(&self, noted: Option<NotedIdentity<'_>>) -> UnavailableReason {
        dead(&self.named, noted)
    }
}

impl DirectorySource {
    /// There is no such directory, for the reason `why`. If its file system is not mounted, the
    /// mount is awaited.
    fn missing(&self, noted: Option<NotedIdentity<'_>>, why: &str) -> UnavailableReason {
        let unmounted = |place: &PathBuf| is_mounted(place) == Some(false);
        if let Some(place) = self.mountpoint.as_ref().filter(|place| unmounted(place)) {
            return not_mounted(place);
        }
        let above = self.named.ancestors().skip(1).find_map(|above| Root::open(above).ok());
        let is_elsewhere = |noted: &NotedIdentity<'_>| {
            let there =
                above.as_ref().map(|above| above.difference(noted.identity, noted.same_boot));
            there.is_none_or(|difference| difference == Some(Difference::FileSystem))
        };
        let Some(noted) = noted.filter(is_elsewhere) else {
            return UnavailableReason::Wrong(why.to_owned());
        };
        let (dir, expected) = (self.named.display(), noted.identity.to_string());
        let why = format!(
            "{dir} is not there, and the export was made on {expected}, which is not mounted there: \
             mount it"
        );
        UnavailableReason::Awaited { why, expected, found: "no such directory".to_owned() }
    }

    /// Whether the option `mountpoint` is heeded.
    fn check_mounted(&self, root: &Root) -> Result<(), UnavailableReason> {
        let Some(place) = &self.mountpoint else { return Ok(()) };
        match root.is_on_what_is_mounted_at(place) {
            Ok(true) => Ok(()),
            Ok(false) => Err(not_mounted(place)),
            Err(error) => {
                Err(UnavailableReason::Wrong(format!("mountpoint={}: {error}", place.display())))
            }
        }
    }
}

/// The program of the file system below has ended.
fn dead(dir: &Path, noted: Option<NotedIdentity<'_>>) -> UnavailableReason {
    let expected =
        noted.map_or_else(|| "its file system".to_owned(), |noted| noted.identity.to_string());
    let dir = dir.display();
    let why = format!(
        "the file system below {dir} has died ({expected}): unmount it (`umount -l {dir}`) and mount \
         it again"
    );
    let found = "a file system whose program has gone".to_owned();
    UnavailableReason::Awaited { why, expected, found }
}

fn not_mounted(place: &Path) -> UnavailableReason {
    let place = place.display();
    let why = format!("nothing is mounted at {place} (its option mountpoint): mount it");
    let (expected, found) = (format!("a mount at {place}"), "none".to_owned());
    UnavailableReason::Awaited { why, expected, found }
}

/// Whether something is mounted at a place; none if there is no such place.
fn is_mounted(place: &Path) -> Option<bool> {
    let root = Root::open(place).ok()?;
    root.is_on_what_is_mounted_at(place).ok()
}
