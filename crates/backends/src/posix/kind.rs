//! The kind of exports that are directories: their options, and how they are opened.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dray_core::{FileId, Fut, OnOutsideChanges, Result, UpperLeases};

use super::{Inline, PosixFs, PosixOptions, Root, source::DirectorySource};
use crate::backend::{
    Backend, BackendKind, BackendResources, BackendSource, Difference, ExportLocation,
    ExportSettings, FoundBackend, FsIdentity, Hang, NotedIdentity, WrongOption,
};

/// Most threads of each lane of an export.
const THREADS_MAX: u64 = 1024;

/// Directories of the server's machine.
#[derive(Debug)]
pub struct PosixKind;

impl BackendKind for PosixKind {
    fn name(&self) -> &'static str {
        "posix"
    }

    fn has_directory(&self) -> bool {
        true
    }

    fn options(&self) -> &'static [&'static str] {
        &["direct", "inline", "threads", "mountpoint", "watch_outside"]
    }

    fn configure(
        &self,
        settings: &ExportSettings<'_>,
    ) -> std::result::Result<Arc<dyn BackendSource>, WrongOption> {
        let defaults = PosixOptions::default();
        let threads = settings.number("threads", (0, THREADS_MAX))?.unwrap_or(0);
        let options = PosixOptions {
            read_only: settings.read_only,
            squash: settings.squash,
            inline: inline(settings)?,
            direct: settings.switch("direct")?,
            watches_outside: settings.switch("watch_outside")?,
            threads_max: if threads == 0 { defaults.threads_max } else { threads as usize },
            ..defaults
        };
        if options.watches_outside && !settings.leases {
            let what = "watch_outside: it needs leases, too".to_owned();
            return Err(WrongOption { what, value: String::new(), known: &[] });
        }
        let mountpoint = mountpoint(settings)?;
        Ok(Arc::new(DirectorySource { named: settings.dir.to_owned(), mountpoint, options }))
    }
}

fn inline(settings: &ExportSettings<'_>) -> std::result::Result<Inline, WrongOption> {
    match settings.get("inline") {
        None | Some("auto") => Ok(Inline::Auto),
        Some("always") => Ok(Inline::Always),
        Some("never") => Ok(Inline::Never),
        Some(word) => {
            let known = &["auto", "always", "never"];
            Err(WrongOption::new("inline", "auto, always or never", word, known))
        }
    }
}

/// Where a file system must be mounted. `yes`: at the directory itself; else the option names a
/// directory above it.
fn mountpoint(settings: &ExportSettings<'_>) -> std::result::Result<Option<PathBuf>, WrongOption> {
    match settings.get("mountpoint") {
        None | Some("no") => Ok(None),
        Some("yes") => Ok(Some(settings.dir.to_owned())),
        Some(path) if path.starts_with('/') => Ok(Some(path.into())),
        Some(word) => {
            let choices = "yes, no or the absolute path of a mount point";
            Err(WrongOption::new("mountpoint", choices, word, &["yes", "no"]))
        }
    }
}

/// A directory that was found.
pub(super) struct FoundDirectory {
    /// Without links.
    pub(super) dir: PathBuf,
    pub(super) root: Root,
    pub(super) options: PosixOptions,
}

impl FoundBackend for FoundDirectory {
    fn dir(&self) -> &Path {
        &self.dir
    }

    fn identity(&self) -> Option<&FsIdentity> {
        Some(self.root.identity())
    }

    fn difference(&self, noted: NotedIdentity<'_>) -> Option<Difference> {
        self.root.difference(noted.identity, noted.same_boot)
    }

    fn shared_id_key(&self) -> std::result::Result<Option<u128>, String> {
        self.root.shared_id_key().map_err(|error| {
            format!(
                "the servers of a projection sign ids of files by a key in the attribute {} of the \
                 directory; the file system below does not let them keep it there: {error}",
                String::from_utf8_lossy(super::shared_key::NAME)
            )
        })
    }

    fn open(self: Box<Self>, resources: BackendResources) -> Result<Arc<dyn Backend>> {
        let options = PosixOptions {
            id_key: Some(resources.id_key),
            shared_ids: resources.shared_ids,
            path_table_file: Some(resources.state_file),
            descriptor_store: resources.descriptor_store,
            keeps_removed: resources.keeps_removed,
            open_descriptors_max: resources.open_descriptors_max,
            inode_cache_max: resources.inode_cache_max,
            on_death: Some(resources.on_death),
            ..self.options
        };
        Ok(PosixFs::serve(self.root, resources.uuid, options)?)
    }
}

impl Backend for PosixFs {
    fn caveats(&self) -> Vec<String> {
        PosixFs::caveats(self)
    }

    fn has_shared_ids(&self) -> bool {
        PosixFs::has_shared_ids(self)
    }

    fn hang(&self, least: Duration) -> Option<Hang> {
        PosixFs::hang(self, least)
    }

    fn upkeep(&self) -> Fut<'_, ()> {
        Box::pin(self.close_idle_inodes())
    }

    fn location<'a>(&'a self, dir: &'a Path) -> Fut<'a, ExportLocation> {
        Box::pin(self.location(dir))
    }

    fn is_mortal(&self) -> bool {
        PosixFs::is_mortal(self)
    }

    fn is_dead(&self) -> Fut<'_, bool> {
        Box::pin(PosixFs::is_dead(self))
    }

    fn servers_away(&self) -> Option<String> {
        None
    }

    /// The descriptor store has what is left, and is asked elsewhere.
    fn recovered(&self) {}

    fn find_removed(&self) -> Result<()> {
        PosixFs::find_removed(self)
    }

    fn forget_removed(&self, are_ours: &dyn Fn(FileId) -> bool) {
        PosixFs::forget_removed(self, are_ours);
    }

    fn watch_outside(
        &self,
        on_changes: Arc<dyn OnOutsideChanges>,
    ) -> std::result::Result<(), String> {
        PosixFs::watch_outside(self, on_changes)
    }

    fn outside_unnoticed(&self) -> Option<String> {
        PosixFs::outside_unnoticed(self)
    }

    fn upper_leases(&self) -> Option<Arc<dyn UpperLeases>> {
        None
    }

    fn leave(&self) {
        PosixFs::leave(self);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::backend::Squash;

    fn configured(
        options: &[(&str, &str)],
    ) -> std::result::Result<Arc<dyn BackendSource>, WrongOption> {
        let own = options.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let own: BTreeMap<String, String> = own.collect();
        let (dir, squash) = (Path::new("/x/y"), Squash::None);
        let (read_only, leases) = (false, true);
        let settings = ExportSettings { name: "a", dir, read_only, leases, squash, own: &own };
        PosixKind.configure(&settings)
    }

    #[test]
    fn options_are_taken() {
        for (value, mountpoint) in
            [("yes", "Some(\"/x/y\")"), ("no", "None"), ("/x", "Some(\"/x\")")]
        {
            let source = format!("{:?}", configured(&[("mountpoint", value)]).unwrap());
            assert!(source.contains(&format!("mountpoint: {mountpoint},")), "{source}");
        }
        let source = configured(&[
            ("inline", "never"),
            ("direct", "yes"),
            ("threads", "7"),
            ("watch_outside", "yes"),
        ]);
        let source = format!("{:?}", source.unwrap());
        for word in ["inline: Never", "direct: true", "threads_max: 7,", "watches_outside: true"] {
            assert!(source.contains(word), "{source}");
        }
        assert!(format!("{:?}", configured(&[("threads", "0")])).contains("threads_max: 16,"));
    }

    #[test]
    fn wrong_values_are_reported_with_the_valid_ones() {
        for (option, value, words) in [
            (
                "mountpoint",
                "srv",
                "mountpoint is yes, no or the absolute path of a mount point, not",
            ),
            ("inline", "x", "inline is auto, always or never, not `x`"),
            ("direct", "1", "direct is yes or no, not `1`"),
            ("threads", "1025", "threads is a number up to 1024, not `1025`"),
            ("threads", "many", "threads is a number up to 1024, not `many`"),
        ] {
            let wrong = configured(&[(option, value)]).unwrap_err();
            assert!(wrong.what.contains(words), "{wrong:?}");
            assert_eq!(wrong.value, value);
        }
    }
}
