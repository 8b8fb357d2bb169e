//! Placement over servers with their own disks (ADR 0043).
//!
//! The *home* is the first server of the definition. It has all names and attributes as real files, the
//! *stubs*, which are empty. The data of a file are *objects* at the *targets*, which are all servers. An
//! object is a sparse file that has the file's bytes at the file's own offsets. So the size of a file is
//! the largest of the sizes of its objects.
//!
//! A client opens stubs as its caller, so that the home decides who may do what. It opens objects as the
//! super-user, whom the export may squash. Only clients that speak for all their users can do that.

mod directory;
mod file;
mod fs;
mod object;
mod session;
mod transfer;
mod tree;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use dray_core::{
    Attr, Context, Errno, Error, FileId, FileSystem, FileType, FsInfo, IdMap, Identity,
    NEW_OBJECT_ATTRIBUTE, Name, NodeId, OBJECT_ATTRIBUTE, Origin, PageValidity, Pid, RequestId,
    Result, Ttl, Validity,
};

use super::mapping::{Placement, ServerIndex};

pub use fs::OwnDisksFs;
pub use object::{ObjectId, probe_target};
pub use session::own_disks_stack;
pub use tree::{TREE_LINK, WrongTree, find_wrong_tree};

/// The directory of a projection at its home that has the names.
pub const NAMES_DIR: &str = "names";
/// The directory of a target that has the objects, in directories by the first byte of their ids.
pub const OBJECTS_DIR: &str = "objects";
/// The server of the names.
pub const HOME: ServerIndex = ServerIndex(0);
/// Directories of objects at each target.
pub const SHARDS: usize = 256;
/// What begins so is dray's own.
const OWN_ATTRIBUTES: &[u8] = b"trusted.dray.";

/// Ids of objects that a client remembers. They never change, so that any may be forgotten.
const KNOWN_IDS_MAX: usize = 64 << 10;

/// Nobody says when others change a file at a target, so that nothing is kept of it.
const NOT_KEPT: Validity =
    Validity { name: None, attributes: Some(Ttl::ZERO), pages: Some(PageValidity::Never) };

/// The servers of a projection, and what a client knows of them.
pub(super) struct OwnDisks {
    placement: Placement,
    /// In the order of the definition; the first one is the home.
    servers: Vec<Arc<dyn FileSystem>>,
    info: FsInfo,
    names: OnceLock<FileId>,
    /// For each server.
    shards: Vec<Box<[OnceLock<FileId>]>>,
    ids: Mutex<IdMap<FileId, ObjectId>>,
}

/// The same request by the super-user, as its step of this number. No two changes of one request at
/// one server have the same number. So a client process after this one repeats each as what it was.
fn step(cx: &Context, number: u32) -> Context {
    Context { who: Identity::system(), ..cx.part(number as usize) }
}

/// For what no request will repeat. Of no process, so that a lookup opens nothing for it.
fn unrepeated(cx: &Context) -> Context {
    Context { who: Identity::system(), origin: Origin::default(), pid: Pid(0), ..cx.clone() }
}

/// For what goes on when the request that it comes from has ended.
fn of_no_request() -> Context {
    Context::new(NodeId::OWN, RequestId(0), Identity::system(), Pid(0))
}

impl OwnDisks {
    fn new(placement: Placement, servers: Vec<Arc<dyn FileSystem>>) -> OwnDisks {
        assert_eq!(servers.len(), placement.servers_count(), "one file system for each server");
        let info = servers[0].info().clone();
        let shards = servers.iter().map(|_| (0..SHARDS).map(|_| OnceLock::new()).collect());
        let (shards, names, ids) = (shards.collect(), OnceLock::new(), Mutex::default());
        OwnDisks { placement, servers, info, names, shards, ids }
    }

    fn home(&self) -> &dyn FileSystem {
        self.at(HOME)
    }

    fn at(&self, ServerIndex(index): ServerIndex) -> &dyn FileSystem {
        &*self.servers[usize::from(index)]
    }

    /// What `id` is at the home: the root of the projection is a directory within the export there.
    async fn at_home(&self, cx: &Context, id: FileId) -> Result<FileId> {
        if id != self.info.root {
            return Ok(id);
        }
        if let Some(names) = self.names.get() {
            return Ok(*names);
        }
        let found = self.home().lookup(&unrepeated(cx), self.info.root, name(NAMES_DIR)?).await;
        let entry = found.map_err(|error| not_prepared(error, "names"))?;
        Ok(*self.names.get_or_init(|| entry.id))
    }

    /// The reverse of [`OwnDisks::at_home`].
    fn seen(&self, id: FileId) -> FileId {
        if self.names.get() == Some(&id) { self.info.root } else { id }
    }

    /// The attributes of a file whose stub has these.
    async fn whole(&self, cx: &Context, id: FileId, stub: Attr) -> Result<Attr> {
        if stub.file_type() != FileType::Regular {
            return Ok(stub);
        }
        let mut attr = Attr { size: 0, validity: NOT_KEPT, ..stub };
        let Some(object) = self.object_of(cx, id).await? else { return Ok(attr) };
        for part in self.parts_of(cx, object).await? {
            attr.size = attr.size.max(part.size);
            attr.blocks = attr.blocks.saturating_add(part.blocks);
            attr.atime = attr.atime.max(part.atime);
            attr.mtime = attr.mtime.max(part.mtime);
            attr.ctime = attr.ctime.max(part.ctime);
        }
        Ok(attr)
    }

    fn known_id(&self, id: FileId) -> Option<ObjectId> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).get(&id).copied()
    }

    /// The id of a file's objects, if it has any.
    async fn object_of(&self, cx: &Context, id: FileId) -> Result<Option<ObjectId>> {
        if let Some(known) = self.known_id(id) {
            return Ok(Some(known));
        }
        match self.ask_object(cx, id, OBJECT_ATTRIBUTE).await {
            Ok(object) => Ok(Some(object)),
            Err(error) if error.errno() == Errno::ENODATA => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The id of a file's objects; the home gives it one where it has none.
    async fn make_object(&self, cx: &Context, id: FileId) -> Result<ObjectId> {
        match self.known_id(id) {
            Some(known) => Ok(known),
            None => self.ask_object(cx, id, NEW_OBJECT_ATTRIBUTE).await,
        }
    }

    async fn ask_object(&self, cx: &Context, id: FileId, attribute: &[u8]) -> Result<ObjectId> {
        let value = self.home().getxattr(&unrepeated(cx), id, attribute).await?;
        let object = ObjectId::from_attribute(&value)?;
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        if ids.len() >= KNOWN_IDS_MAX {
            ids.clear();
        }
        ids.insert(id, object);
        Ok(object)
    }

    fn forget(&self, id: FileId) {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }
}

/// A server that has not what `dray serve` makes there, or has another one than this client knows.
fn not_prepared(error: Error, what: &'static str) -> Error {
    match error.errno() {
        Errno::ENOENT | Errno::ESTALE => Error::new(Errno::EIO).because(match what {
            "names" => "the home has no directory of names: its disk is another one",
            _ => "a target has no directory of objects: its disk is another one",
        }),
        _ => error,
    }
}

fn name(text: &str) -> Result<&Name> {
    Name::new(text.as_bytes())
}
