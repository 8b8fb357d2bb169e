//! The intent that is noted before a change that must not be applied twice over the death of the
//! server process. The intent says what was there before. [`settle`](super::settle) finds out by it
//! whether the change was applied.

use std::cell::Cell;
use std::sync::Arc;

use dray_core::{
    Context, CreateHow, Entry, Errno, Error, FileId, Name, OpenFile, RenameHow, Result,
};

use crate::server::as_server;
use crate::server::exactly_once::maker::Maker;
use crate::server::exactly_once::settle::{Amend, bars_the_change, is_regular};
use crate::server::execute::{Files, span};
use crate::server::journal::INTENT_MAX_BYTES;
use crate::server::ranges::{RangeGrant, RangeTable, Span};
use crate::server::session::ServerSession;
use crate::wire::{Intent, Wire};

/// The grants that a change needs of files, and the intent to note before it.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) intent: Vec<u8>,
    /// Where an append goes, bytes.
    pub(crate) append_at: Option<u64>,
    /// Files that the names of the change lead to. They lose a name, get another one, or are cut.
    pub(crate) named: [Option<FileId>; 2],
    /// The file that a removal or a rename takes a name from.
    pub(crate) takes_name_of: Option<FileId>,
    grants: [Option<RangeGrant>; 2],
}

thread_local! {
    /// The memory of the last intent, for the next.
    static SPARE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

impl Plan {
    fn new(intent: Vec<u8>, grant: RangeGrant, second: Option<RangeGrant>) -> Plan {
        let grants = [Some(grant), second];
        Plan { intent, append_at: None, named: [None; 2], takes_name_of: None, grants }
    }

    fn leading_to(mut self, named: [Option<FileId>; 2]) -> Plan {
        self.named = named;
        self
    }

    /// The first of the files that the names lead to loses that name.
    fn taking_name(mut self) -> Plan {
        self.takes_name_of = self.named[0];
        self
    }

    /// The file that a put has just made belongs to the put, too, until its data are in it. After a
    /// crash, a concurrent append could not be distinguished from the put's own bytes.
    pub(crate) async fn made(&mut self, ranges: &Arc<RangeTable>, file: FileId) {
        if self.grants[1].is_none() {
            self.grants[1] = Some(to_overwrite(ranges, file).await);
        }
    }

    /// The change's grant of this file.
    pub(crate) fn grant_of(&mut self, file: FileId) -> Option<&mut RangeGrant> {
        self.grants.iter_mut().flatten().find(|grant| grant.file() == file)
    }

    /// The stamp of the data that it writes.
    pub(crate) fn stamp(&self) -> Option<u64> {
        self.grants.iter().flatten().find_map(RangeGrant::stamp)
    }
}

/// All of a file, to be cut and written.
async fn to_overwrite(ranges: &Arc<RangeTable>, file: FileId) -> RangeGrant {
    let mut grant = ranges.change(file, Span::ALL).await;
    grant.write(Span::ALL).await;
    grant
}

/// The files, plan and amendment with which a call is carried out.
pub(crate) struct ChangeState<'a> {
    /// The files that the call names, if it is a change.
    pub(crate) files: &'a Files,
    /// The plan of a change that is made for the first time.
    pub(crate) plan: Option<&'a mut Plan>,
    /// The difference to its first time, of a change that is made again.
    pub(crate) amend: Option<Amend>,
}

impl Drop for Plan {
    fn drop(&mut self) {
        let intent = std::mem::take(&mut self.intent);
        let _ = SPARE.try_with(|spare| spare.set(intent)); // the thread may be ending
    }
}

/// Waits until no other change of the same is under way, and looks at what there is. None for a
/// call that may be repeated without harm. Errors: the state on disk cannot be read. A later server
/// could not decide whether the change was made, so it must not begin.
pub(crate) async fn plan(
    session: &ServerSession,
    cx: &Context,
    (intent, files): (Intent<'_>, &Files),
    data_bytes: usize,
) -> Result<Option<Plan>> {
    let look = || {
        let mut intent = SPARE.take();
        intent.clear();
        Inspection { session, cx: as_server::to_look(cx), caller: cx, files, intent }
    };
    let plan = match intent {
        Intent::None => return Ok(None),
        Intent::Repeat(file, extent) => {
            repeat(session, files.id(file)?, span(extent, data_bytes)).await
        }
        Intent::Make { dir, name, file_type } => look().make((dir, name), file_type).await?,
        Intent::Create { dir, name, how } => look().create((dir, name), how).await?,
        Intent::Link { id, dir, name } => look().link(id, (dir, name)).await?,
        Intent::Remove { dir, name } => look().remove((dir, name)).await?,
        Intent::Put { dir, name } => look().put((dir, name), data_bytes).await?,
        Intent::Rename { from, to, how } => look().rename(from, to, how).await?,
        Intent::Append { handle } => look().append(handle, data_bytes).await?,
        Intent::Copy { from, to, len_bytes } => look().copy(from, to, len_bytes).await?,
        Intent::SetXattr { id, name } => look().xattr(id, name, true).await,
        Intent::RemoveXattr { id, name } => look().xattr(id, name, false).await,
    };
    // Only names that no file system takes make it longer: such a call changes nothing.
    Ok(Some(plan).filter(|plan| plan.intent.len() <= INTENT_MAX_BYTES))
}

/// The file that a creation cuts, or a put replaces, as far as it is there. Others may change that, without a
/// grant.
pub(crate) async fn found_by_name(
    session: &ServerSession,
    cx: &Context,
    intent: Intent<'_>,
) -> Option<FileId> {
    let (dir, name) = match intent {
        Intent::Create { dir, name, how } if how.open.truncates() => (dir, name),
        Intent::Put { dir, name } => (dir, name),
        Intent::None
        | Intent::Repeat(..)
        | Intent::Make { .. }
        | Intent::Create { .. }
        | Intent::Link { .. }
        | Intent::Remove { .. }
        | Intent::Rename { .. }
        | Intent::Append { .. }
        | Intent::Copy { .. }
        | Intent::SetXattr { .. }
        | Intent::RemoveXattr { .. } => return None,
    };
    let (files, intent) = (&Files::default(), Vec::new());
    let look = Inspection { session, cx: as_server::to_look(cx), caller: cx, files, intent };
    look.find(dir, name).await.ok()?.filter(is_regular).map(|file| file.id)
}

/// A change whose repetition sets the same again, so that there is no need to know whether it was
/// made.
async fn repeat(session: &ServerSession, file: FileId, span: Span) -> Plan {
    let mut intent = SPARE.take();
    intent.clear();
    (false, (file, span)).put(&mut intent);
    Plan::new(intent, session.export.ranges.change(file, span).await, None)
}

/// What a look at a name has found. None: nothing, or the change fails as the look does.
fn entry_or_none(found: Result<Entry>) -> Result<Option<Entry>> {
    match found {
        Ok(entry) => Ok(Some(entry)),
        Err(error) if bars_the_change(error.errno()) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A name in a directory.
type NameIn<'a> = (FileId, &'a [u8]);

/// Looks, each of which makes a plan.
struct Inspection<'a> {
    session: &'a ServerSession,
    /// The server's own: what it looks at, the caller may not be allowed to see.
    cx: Context,
    caller: &'a Context,
    files: &'a Files,
    intent: Vec<u8>,
}

impl Inspection<'_> {
    fn ranges(&self) -> &Arc<RangeTable> {
        &self.session.export.ranges
    }

    fn file(&self, handle: u64) -> Result<Arc<dyn OpenFile>> {
        self.files.get(handle).cloned().ok_or_else(|| Error::new(Errno::EBADF))
    }

    /// The entry that has this name, if there is one.
    async fn find(&self, dir: FileId, name: &[u8]) -> Result<Option<Entry>> {
        entry_or_none(self.look(dir, name).await)
    }

    /// The entry of a name that the change takes away. Errors: the answer. The name is absent, also to the caller.
    ///
    /// The servers of a cluster do not keep each other's changes of names apart. Another one may give the name to
    /// a file behind this look. A change that is noted as one that found nothing must not take that file away. The
    /// next server would take it for one that was not made. So what finds nothing is not carried out.
    async fn find_to_take(&self, dir: FileId, name: &[u8]) -> Result<Option<Entry>> {
        let mut found = self.look(dir, name).await;
        let is_absent = found.as_ref().is_err_and(|error| error.errno() == Errno::ENOENT);
        if let (true, Ok(name)) = (is_absent && self.others_change_names(), Name::new(name)) {
            found = self.session.export.fs.lookup(&self.caller.uncounted(), dir, name).await;
            if found.as_ref().is_err_and(|error| error.errno() == Errno::ENOENT) {
                return found.map(Some);
            }
        }
        entry_or_none(found)
    }

    /// Whether other servers change names in the same directories: those of a projection. All changes that come to a
    /// server alone are kept apart there, also where it forwards them. The server above may know a change by its
    /// request then, so it has to be asked.
    fn others_change_names(&self) -> bool {
        self.session.export.definition.is_some()
    }

    async fn look(&self, dir: FileId, name: &[u8]) -> Result<Entry> {
        let name = Name::new(name)?;
        let fs = &*self.session.export.fs;
        match fs.lookup(&self.cx, dir, name).await {
            // Some file systems deny the super-user (root_squash of NFS). A caller that may change
            // the name may look it up.
            Err(error) if matches!(error.errno(), Errno::EACCES | Errno::EPERM) => {
                fs.lookup(&self.caller.uncounted(), dir, name).await
            }
            found => found,
        }
    }

    /// The owner that the new file will have.
    fn maker(&self, file_type: u32, data_bytes: usize) -> Option<Maker> {
        Some(Maker::of(&*self.session.export.fs, self.caller, file_type, data_bytes))
    }

    /// The file loses this name, which may be its last. Open handles of it stay valid.
    async fn keep(&self, victim: &Entry) {
        let export = &self.session.export;
        export.recovery_window.keep(&*export.fs, &self.cx, victim).await;
    }

    /// A grant of the directory, and what has the name. Both are noted.
    async fn at_a_name(&mut self, (dir, name): NameIn<'_>) -> Result<(RangeGrant, Option<Entry>)> {
        let grant = self.ranges().change(dir, Span::ALL).await;
        let entry = self.find(dir, name).await?;
        ((dir, name), entry.as_ref().map(|entry| entry.id)).put(&mut self.intent);
        Ok((grant, entry))
    }

    /// The same of a name that the change gives away. Errors: the answer. There is such a name, also to the caller:
    /// another server may take it away behind this look, as in [`find_to_take`](Self::find_to_take).
    async fn at_a_new_name(
        &mut self,
        (dir, name): NameIn<'_>,
    ) -> Result<(RangeGrant, Option<Entry>)> {
        let grant = self.ranges().change(dir, Span::ALL).await;
        let mut entry = self.find(dir, name).await?;
        if let (true, Ok(name)) = (entry.is_some() && self.others_change_names(), Name::new(name)) {
            let caller = self.caller.uncounted();
            match self.session.export.fs.lookup(&caller, dir, name).await {
                Ok(_) => return Err(Errno::EEXIST.into()),
                Err(error) if error.errno() == Errno::ENOENT => entry = None,
                Err(_) => {} // the change fails as well
            }
        }
        ((dir, name), entry.as_ref().map(|entry| entry.id)).put(&mut self.intent);
        Ok((grant, entry))
    }

    async fn make(mut self, name: NameIn<'_>, file_type: u32) -> Result<Plan> {
        let (grant, entry) = self.at_a_new_name(name).await?;
        if entry.is_none() {
            (None::<(FileId, bool)>, self.maker(file_type, 0)).put(&mut self.intent);
        }
        Ok(Plan::new(self.intent, grant, None))
    }

    async fn create(mut self, name: NameIn<'_>, how: CreateHow) -> Result<Plan> {
        let (grant, entry) = match how.exclusive {
            true => self.at_a_new_name(name).await?,
            false => self.at_a_name(name).await?,
        };
        let Some(entry) = entry else {
            (None::<(FileId, bool)>, self.maker(libc::S_IFREG, 0)).put(&mut self.intent);
            return Ok(Plan::new(self.intent, grant, None));
        };
        let cuts = how.open.truncates() && !how.exclusive && is_regular(&entry);
        cuts.put(&mut self.intent);
        let second = match cuts {
            true => Some(to_overwrite(self.ranges(), entry.id).await),
            false => None,
        };
        let named = [cuts.then_some(entry.id), None];
        Ok(Plan::new(self.intent, grant, second).leading_to(named))
    }

    async fn link(mut self, id: FileId, name: NameIn<'_>) -> Result<Plan> {
        let (grant, _) = self.at_a_new_name(name).await?;
        id.put(&mut self.intent);
        Ok(Plan::new(self.intent, grant, None))
    }

    async fn remove(mut self, name: NameIn<'_>) -> Result<Plan> {
        let grant = self.ranges().change(name.0, Span::ALL).await;
        let entry = self.find_to_take(name.0, name.1).await?;
        (name, entry.as_ref().map(|entry| entry.id)).put(&mut self.intent);
        if let Some(victim) = &entry {
            self.keep(victim).await;
        }
        let named = [entry.map(|entry| entry.id), None];
        Ok(Plan::new(self.intent, grant, None).leading_to(named).taking_name())
    }

    async fn put(mut self, name: NameIn<'_>, data_bytes: usize) -> Result<Plan> {
        let (grant, entry) = self.at_a_name(name).await?;
        (None::<(FileId, bool)>, self.maker(libc::S_IFREG, data_bytes)).put(&mut self.intent);
        let second = match entry.filter(is_regular) {
            Some(file) => Some(to_overwrite(self.ranges(), file.id).await),
            None => None,
        };
        let named = [entry.map(|entry| entry.id), None];
        Ok(Plan::new(self.intent, grant, second).leading_to(named))
    }

    async fn rename(mut self, from: NameIn<'_>, to: NameIn<'_>, how: RenameHow) -> Result<Plan> {
        let (one, two) = ((from.0, Span::ALL), (to.0, Span::ALL));
        let (grant, second) = self.ranges().change_both(one, two).await;
        (from, to).put(&mut self.intent);
        how.put(&mut self.intent);
        let source = self.find_to_take(from.0, from.1).await?;
        source.map(|entry| entry.id).put(&mut self.intent);
        let victim = match how {
            RenameHow::Exchange => self.find_to_take(to.0, to.1).await?,
            RenameHow::Replace | RenameHow::NoReplace => self.find(to.0, to.1).await?,
        };
        victim.as_ref().map(|entry| entry.id).put(&mut self.intent);
        if let (RenameHow::Replace, Some(victim)) = (how, &victim) {
            self.keep(victim).await;
        }
        let named = [source, victim].map(|entry| entry.map(|entry| entry.id));
        Ok(Plan::new(self.intent, grant, second).leading_to(named).taking_name())
    }

    async fn append(mut self, handle: u64, data_bytes: usize) -> Result<Plan> {
        let file = self.file(handle)?;
        let grant = self.ranges().change(file.id(), Span::ALL).await;
        let size = file.getattr(&self.cx).await?.size;
        (true, (file.id(), (size, data_bytes as u64))).put(&mut self.intent);
        let mut plan = Plan::new(self.intent, grant, None);
        plan.append_at = Some(size);
        Ok(plan)
    }

    /// No other call changes the source either: when the copy is made again the source must be what
    /// it was. Open files, and offsets in them, are `from` and `to`.
    async fn copy(mut self, from: (u64, u64), to: (u64, u64), len_bytes: u64) -> Result<Plan> {
        let (source, target) = (self.file(from.0)?.id(), self.file(to.0)?.id());
        if source == target {
            return self.copy_within(from).await;
        }
        let source = (source, Span::bytes(from.1, len_bytes));
        let target = (target, Span::bytes(to.1, len_bytes));
        (false, (target, source)).put(&mut self.intent);
        let (grant, second) = self.ranges().change_both(source, target).await;
        Ok(Plan::new(self.intent, grant, second))
    }

    async fn copy_within(mut self, (handle, at): (u64, u64)) -> Result<Plan> {
        let file = self.file(handle)?;
        let grant = self.ranges().change(file.id(), Span::ALL).await;
        let size = file.getattr(&self.cx).await?.size;
        (true, (file.id(), size.saturating_sub(at))).put(&mut self.intent);
        Ok(Plan::new(self.intent, grant, None))
    }

    /// If the existing state is unknown, the state that it is to `be` is noted. Then the change is
    /// made again, which is no harm.
    async fn xattr(mut self, id: FileId, name: &[u8], be: bool) -> Plan {
        let grant = self.ranges().change(id, Span::ALL).await;
        (id, name).put(&mut self.intent);
        let existed = match self.session.export.fs.getxattr(&self.cx, id, name).await {
            Ok(_) => true,
            Err(error) if error.errno() == Errno::ENODATA => false,
            Err(_) => be,
        };
        existed.put(&mut self.intent);
        Plan::new(self.intent, grant, None)
    }
}
