//! Whether an export may be served from what is at its place. What keeps it from that is told in words,
//! with what is waited for, what is there, and what to do.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use dray_backends::posix::{Difference, Root};
use dray_core::Errno;

use crate::error::Failure;
use crate::paths;
use crate::serve::exported::Held;
use crate::serve::opening::{Hindrance, Opening};
use crate::serve::origins::{Noted, Origins, Whose};
use crate::serve::state::Exports;

impl Opening {
    /// The directory without links, opened. Errors: it is not there, or not what it has to be.
    pub(super) fn root(&self) -> Result<(PathBuf, Root), Hindrance> {
        let plan = &self.plan;
        let found = std::fs::canonicalize(&plan.dir);
        let found = found.and_then(|dir| Ok((std::fs::metadata(&dir)?.is_dir(), dir)));
        let (is_dir, dir) = found.map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                self.missing(&format!("{error}; make it first, or correct the path"))
            }
            ErrorKind::NotConnected => self.dead(&plan.dir),
            _ => Failure::new(format!("{}: {error}", self.cannot())).into(),
        })?;
        if !is_dir {
            let what = "it is not a directory; name the directory that it is in";
            return Err(self.missing(what));
        }
        let root = Root::open(&dir).map_err(|error| match error.errno() {
            Errno::ENOTCONN => self.dead(&dir),
            _ => {
                let root = paths::is_root();
                let root = if root { "" } else { "; `dray serve` must be started by root" };
                Failure::new(format!("{}: {error}{root}", self.cannot())).into()
            }
        })?;
        self.check_mounted(&root)?;
        Ok((dir, root))
    }

    /// What the export was made on, as far as that is known by its name.
    fn noted(&self) -> Option<Noted> {
        let origins = self.with_state(|state| state.origins()).ok()?;
        origins.of(Whose::Named(&self.plan.dir))
    }

    /// There is no such directory: `why`. One whose file system is not mounted is waited for.
    fn missing(&self, why: &str) -> Hindrance {
        let (name, dir) = (&self.plan.name, self.plan.dir.display());
        let unmounted = |place: &PathBuf| is_mounted(place) == Some(false);
        if let Some(place) = self.plan.mountpoint.as_ref().filter(|place| unmounted(place)) {
            return self.not_mounted(place);
        }
        let above = self.plan.dir.ancestors().skip(1).find_map(|above| Root::open(above).ok());
        let is_elsewhere = |noted: &Noted| {
            let same_boot = noted.boot == self.boot;
            let there = above.as_ref().map(|above| above.difference(&noted.origin, same_boot));
            there.is_none_or(|difference| difference == Some(Difference::FileSystem))
        };
        let Some(noted) = self.noted().filter(is_elsewhere) else {
            return Failure::new(format!("{}: {why}", self.cannot())).into();
        };
        let expected = noted.origin.to_string();
        let words = format!(
            "export `{name}` is held back: {dir} is not there, and the export was made on {expected}, \
             which is not mounted there: mount it, and the export goes on by itself; clients wait"
        );
        let found = "no such directory".to_owned();
        Hindrance::held(words, Held { expected, found, acceptable: None })
    }

    /// The program of the file system below has gone.
    pub(super) fn dead(&self, dir: &Path) -> Hindrance {
        let name = &self.plan.name;
        let noted = self.noted();
        let expected =
            noted.map_or_else(|| "its file system".to_owned(), |one| one.origin.to_string());
        let dir = dir.display();
        let words = format!(
            "export `{name}` is held back: the file system below {dir} has died ({expected}): unmount \
             it (`umount -l {dir}`) and mount it again, and the export goes on by itself; clients wait"
        );
        let found = "a file system whose program has gone".to_owned();
        Hindrance::held(words, Held { expected, found, acceptable: None })
    }

    /// Whether the option `mountpoint` is heeded.
    fn check_mounted(&self, root: &Root) -> Result<(), Hindrance> {
        let Some(place) = &self.plan.mountpoint else { return Ok(()) };
        match root.is_on_what_is_mounted_at(place) {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.not_mounted(place)),
            Err(error) => {
                let place = place.display();
                Err(Failure::new(format!("{}: mountpoint={place}: {error}", self.cannot())).into())
            }
        }
    }

    fn not_mounted(&self, place: &Path) -> Hindrance {
        let (name, place) = (&self.plan.name, place.display());
        let words = format!(
            "export `{name}` is held back: nothing is mounted at {place} (its option mountpoint): mount \
             it, and the export goes on by itself; clients wait"
        );
        let (expected, found) = (format!("a mount at {place}"), "none".to_owned());
        Hindrance::held(words, Held { expected, found, acceptable: None })
    }

    /// Whether `root` is what the export was made on, or an administrator has said that it may be
    /// served from it. Then the export becomes another one: what clients know of it, and have open,
    /// means nothing on this file system.
    pub(super) fn check_origin(
        &self,
        dir: &Path,
        root: &Root,
        (exports, origins): (&Exports, &Origins),
    ) -> Result<(), Hindrance> {
        let Some(noted) = origins.of(Whose::Dir(dir)) else { return Ok(()) };
        let Some(difference) = root.difference(&noted.origin, noted.boot == self.boot) else {
            return Ok(());
        };
        let (name, there) = (&self.plan.name, root.origin());
        if self.exported.accepts(there) {
            exports.renew(dir)?;
            log::warn!(
                "export `{name}` is made anew on {there}, as was said; clients mount anew: what they \
                 know of it is stale"
            );
            return Ok(());
        }
        let (shown, was) = (dir.display(), noted.origin.to_string());
        let (expected, found, mend) = match difference {
            Difference::FileSystem => (was, there.to_string(), "mount that one there"),
            Difference::Directory => (
                format!("the directory of {was} that it was made on"),
                format!("another directory of the same file system ({there})"),
                "have that one there, be it mounted or moved",
            ),
        };
        let words = format!(
            "export `{name}` is held back: at {shown} is {found}, and the export was made on {expected}: \
             {mend}, and the export goes on by itself; or, to serve what is there now instead, say \
             `dray accept {name}`; clients wait"
        );
        let acceptable = Some(there.clone());
        Err(Hindrance::held(words, Held { expected, found, acceptable }))
    }
}

/// Whether something is mounted at a place; none if there is no such place.
fn is_mounted(place: &Path) -> Option<bool> {
    let root = Root::open(place).ok()?;
    root.is_on_what_is_mounted_at(place).ok()
}
