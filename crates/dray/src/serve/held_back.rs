//! Decides whether an export may be served from the file system at its path. The reason against it says what
//! the export waits for, what is there, and what to do.

use dray_backends::backend::{Difference, FoundBackend, NotedIdentity, UnavailableReason};

use crate::error::Failure;
use crate::serve::export_state::HoldReason;
use crate::serve::fs_identities::{ExportDirectory, FsIdentities, IdentityNote};
use crate::serve::opening::{ExportOpener, OpenFailure};
use crate::serve::state::ExportRegistry;

impl ExportOpener {
    /// What is to be served. Errors: it is not there, or not what it has to be.
    pub(super) fn find(&self) -> Result<Box<dyn FoundBackend>, OpenFailure> {
        let noted = self.noted();
        let found = self.plan.source.find(noted.as_ref().map(|noted| self.compared(noted)));
        found.map_err(|unavailable| self.hindrance(unavailable))
    }

    /// The export's file system has died while the export was opened.
    pub(super) fn died(&self) -> OpenFailure {
        let noted = self.noted();
        let noted = noted.as_ref().map(|noted| self.compared(noted));
        self.hindrance(self.plan.source.died(noted))
    }

    fn hindrance(&self, unavailable: UnavailableReason) -> OpenFailure {
        match unavailable {
            UnavailableReason::Wrong(why) => {
                Failure::new(format!("{}: {why}", self.cannot())).into()
            }
            UnavailableReason::Awaited { why, expected, found } => {
                let held = HoldReason { expected, found, acceptable: None };
                OpenFailure::hold(self.waits(&why), held)
            }
        }
    }

    /// That it is held back, and that nothing but what `why` says is to be done.
    fn waits(&self, why: &str) -> String {
        let name = &self.plan.name;
        format!("export `{name}` is held back: {why}, and the export opens by itself; clients wait")
    }

    /// What the export was made on, as far as that is known by its name.
    fn noted(&self) -> Option<IdentityNote> {
        let fs_identities = self.with_state(|state| state.fs_identities()).ok()?;
        fs_identities.of(ExportDirectory::Named(&self.plan.dir))
    }

    fn compared<'a>(&self, noted: &'a IdentityNote) -> NotedIdentity<'a> {
        NotedIdentity { identity: &noted.identity, same_boot: noted.boot == self.boot }
    }

    /// Whether `there` is what the export was made on, or an administrator has said that it may be
    /// served from it. Then the export becomes another one: what clients know of it, and have open,
    /// means nothing on this file system.
    pub(super) fn check_identity(
        &self,
        there: &dyn FoundBackend,
        (exports, fs_identities): (&ExportRegistry, &FsIdentities),
    ) -> Result<(), OpenFailure> {
        let dir = there.dir();
        let (Some(noted), Some(identity)) =
            (fs_identities.of(ExportDirectory::Dir(dir)), there.identity())
        else {
            return Ok(());
        };
        let Some(difference) = there.difference(self.compared(&noted)) else { return Ok(()) };
        let name = &self.plan.name;
        if self.exported.accepts(identity) {
            exports.renew(dir)?;
            log::warn!(
                "export `{name}` is made anew on {identity}, as `dray accept` said: unmount its \
                 clients, and mount again; what they know of the export is stale"
            );
            return Ok(());
        }
        let (shown, was) = (dir.display(), noted.identity.to_string());
        let (expected, found, mend) = match difference {
            Difference::FileSystem => {
                (was, identity.to_string(), "mount the expected file system there")
            }
            Difference::Directory => (
                format!("the directory of {was} that it was made on"),
                format!("another directory of the same file system ({identity})"),
                "mount or move the expected directory there",
            ),
        };
        let words = format!(
            "export `{name}` is held back: at {shown} is {found}, and the export was made on {expected}: \
             {mend}, and the export opens by itself; or, to serve what is there now instead, say \
             `dray accept {name}`; clients wait"
        );
        let acceptable = Some(identity.clone());
        Err(OpenFailure::hold(words, HoldReason { expected, found, acceptable }))
    }
}
