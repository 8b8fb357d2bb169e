//! The kind of exports that are in memory: for tests, since their files end with the server.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dray_core::{FileId, Fut, OnOutsideChanges, Result, UpperLeases};

use super::{MemoryFs, MemoryOptions};
use crate::backend::{
    Backend, BackendKind, BackendResources, BackendSource, Difference, ExportLocation,
    ExportSettings, FoundBackend, FsIdentity, Hang, NotedIdentity, UnavailableReason, WrongOption,
};

/// File systems in memory.
#[derive(Debug)]
pub struct MemoryKind;

#[derive(Clone, Debug)]
struct MemorySource {
    shown: PathBuf,
    options: MemoryOptions,
}

impl BackendKind for MemoryKind {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn has_directory(&self) -> bool {
        false
    }

    fn options(&self) -> &'static [&'static str] {
        &["size_mib"]
    }

    fn configure(
        &self,
        settings: &ExportSettings<'_>,
    ) -> std::result::Result<Arc<dyn BackendSource>, WrongOption> {
        settings.no_squash(self.name())?;
        let defaults = MemoryOptions::default();
        let mib = settings.number("size_mib", (1, 1 << 20))?;
        let capacity_bytes = mib.map_or(defaults.capacity_bytes, |mib| mib << 20);
        let options = MemoryOptions {
            capacity_bytes,
            read_only: settings.read_only,
            root_mode: 0o1777, // as of other places for everybody's files
            ..defaults
        };
        Ok(Arc::new(MemorySource { shown: settings.dir.to_owned(), options }))
    }
}

impl BackendSource for MemorySource {
    fn find(
        &self,
        _: Option<NotedIdentity<'_>>,
    ) -> std::result::Result<Box<dyn FoundBackend>, UnavailableReason> {
        Ok(Box::new(self.clone()))
    }

    fn died(&self, _: Option<NotedIdentity<'_>>) -> UnavailableReason {
        UnavailableReason::Wrong(
            "the memory of this server does not die before the server".to_owned(),
        )
    }
}

impl FoundBackend for MemorySource {
    fn dir(&self) -> &Path {
        &self.shown
    }

    fn identity(&self) -> Option<&FsIdentity> {
        None
    }

    fn difference(&self, _: NotedIdentity<'_>) -> Option<Difference> {
        None
    }

    fn shared_id_key(&self) -> std::result::Result<Option<u128>, String> {
        Err("no other server has the files in the memory of this one".to_owned())
    }

    fn open(self: Box<Self>, resources: BackendResources) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(MemoryFs::new(MemoryOptions { uuid: resources.uuid, ..self.options })))
    }
}

impl Backend for MemoryFs {
    fn caveats(&self) -> Vec<String> {
        vec!["its files are in memory, and end with this server".to_owned()]
    }

    fn has_shared_ids(&self) -> bool {
        false
    }

    fn hang(&self, _: Duration) -> Option<Hang> {
        None
    }

    fn upkeep(&self) -> Fut<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    fn location<'a>(&'a self, _: &'a Path) -> Fut<'a, ExportLocation> {
        Box::pin(std::future::ready(ExportLocation::There))
    }

    fn is_mortal(&self) -> bool {
        false
    }

    fn is_dead(&self) -> Fut<'_, bool> {
        Box::pin(std::future::ready(false))
    }

    fn servers_away(&self) -> Option<String> {
        None
    }

    fn recovered(&self) {}

    fn find_removed(&self) -> Result<()> {
        Ok(())
    }

    fn forget_removed(&self, _: &dyn Fn(FileId) -> bool) {}

    fn watch_outside(&self, _: Arc<dyn OnOutsideChanges>) -> std::result::Result<(), String> {
        Ok(())
    }

    fn outside_unnoticed(&self) -> Option<String> {
        Some("nothing changes the memory of this server but dray".to_owned())
    }

    fn upper_leases(&self) -> Option<Arc<dyn UpperLeases>> {
        None
    }

    fn leave(&self) {}
}
