//! Objects: the data of a file at one target.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use dray_core::{
    Attr, Context, Entry, Errno, Error, FileId, FileSystem, Fut, Make, NameBuf, RemoveKind, Result,
    SetAttr, TimeSet,
};

use super::{OBJECTS_DIR, OwnDisks, name, not_prepared, of_no_request, step, unrepeated};
use crate::placement::ServerIndex;

/// Objects belong to the user that clients' super-user is at the target, and nobody else opens them.
pub(super) const OBJECT_MODE: u32 = 0o600;

/// Waits before each look whether anybody still has a removed file open. A close may be on its way still.
const BURIAL_WAITS: [Duration; 4] =
    [Duration::ZERO, Duration::from_millis(10), Duration::from_millis(100), Duration::from_secs(1)];

/// Steps of a request that change objects, by what they do.
const CUT_STEPS: u32 = 1 << 12;
const TIME_STEPS: u32 = 2 << 12;

/// The name of a file's objects at all targets: random, and never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId(pub u128);

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl ObjectId {
    /// From the value of the stub's attribute, which is big-endian. Errors: `EIO`.
    pub fn from_attribute(value: &[u8]) -> Result<ObjectId> {
        let bytes = value.try_into().map_err(|_| {
            Error::new(Errno::EIO)
                .because("the attribute with the id of a file's objects is broken")
        })?;
        Ok(ObjectId(u128::from_be_bytes(bytes)))
    }

    /// What the mapping takes in place of an inode number.
    pub fn key(self) -> FileId {
        FileId { ino: (self.0 >> 64) as u64, generation: self.0 as u64 }
    }

    /// Which of the directories of objects it is in.
    pub fn shard(self) -> usize {
        usize::from(self.0.to_be_bytes()[0])
    }

    pub(super) fn file_name(self) -> Result<NameBuf> {
        NameBuf::new(self.to_string().as_bytes())
    }
}

/// Whether a client may open objects at this server. Errors: it may not, or the server has none.
pub async fn probe_target(fs: &dyn FileSystem) -> Result<()> {
    let cx = of_no_request();
    let objects = fs.lookup(&cx, fs.info().root, name(OBJECTS_DIR)?).await?;
    fs.lookup(&cx, objects.id, name("00")?).await.map(drop)
}

impl OwnDisks {
    /// The servers that have blocks of these objects.
    pub(super) fn targets_of(&self, object: ObjectId) -> impl Iterator<Item = ServerIndex> {
        (0..self.placement.width() as u64)
            .map(move |block| self.placement.block(object.key(), block))
    }

    /// The directory that has the object at `target`.
    pub(super) async fn shard(
        &self,
        cx: &Context,
        target: ServerIndex,
        object: ObjectId,
    ) -> Result<FileId> {
        let shard = &self.shards[usize::from(target.0)][object.shard()];
        if let Some(dir) = shard.get() {
            return Ok(*dir);
        }
        let (fs, cx) = (self.at(target), unrepeated(cx));
        let objects = fs.lookup(&cx, fs.info().root, name(OBJECTS_DIR)?).await;
        let objects = objects.map_err(|error| not_prepared(error, OBJECTS_DIR))?;
        let dir = fs.lookup(&cx, objects.id, name(&format!("{:02x}", object.shard()))?).await;
        let dir = dir.map_err(|error| not_prepared(error, OBJECTS_DIR))?;
        Ok(*shard.get_or_init(|| dir.id))
    }

    /// The object at one target, if it is there.
    pub(super) async fn find(
        &self,
        cx: &Context,
        target: ServerIndex,
        object: ObjectId,
    ) -> Result<Option<Entry>> {
        let dir = self.shard(cx, target, object).await?;
        let found = self.at(target).lookup(&unrepeated(cx), dir, &object.file_name()?).await;
        match found {
            Ok(entry) => Ok(Some(entry)),
            Err(error) if error.errno() == Errno::ENOENT => Ok(None),
            Err(error) => Err(self.of_shard(cx, (target, dir), error).await),
        }
    }

    /// Why a call by a directory of objects failed: a server with another disk does not know the directory.
    pub(super) async fn of_shard(
        &self,
        cx: &Context,
        (target, dir): (ServerIndex, FileId),
        error: Error,
    ) -> Error {
        if error.errno() != Errno::ESTALE {
            return error;
        }
        match self.at(target).getattr(&unrepeated(cx), dir).await {
            Err(stale) => not_prepared(stale, OBJECTS_DIR),
            Ok(_) => error,
        }
    }

    /// The attributes of all objects that are there, which are asked for at once.
    pub(super) async fn parts_of(&self, cx: &Context, object: ObjectId) -> Result<Vec<Attr>> {
        let finds = self.targets_of(object).map(|target| {
            Box::pin(self.find(cx, target, object)) as Fut<'_, Result<Option<Entry>>>
        });
        let found: Result<Vec<_>> = dray_rt::join_all(finds.collect()).await.into_iter().collect();
        Ok(found?.into_iter().flatten().map(|entry| entry.attr).collect())
    }

    /// The size of a file with these objects.
    pub(super) async fn size_of(&self, cx: &Context, object: ObjectId) -> Result<u64> {
        let parts = self.parts_of(cx, object).await?;
        Ok(parts.iter().map(|part| part.size).max().unwrap_or(0))
    }

    /// Cuts or lengthens a file. The object with the last byte comes first, since it alone can fail for
    /// want of space or because of a limit. A cut by a client machine that dies halfway stays half done.
    pub(super) async fn cut(&self, cx: &Context, id: FileId, size: u64) -> Result<()> {
        let object = match size {
            0 => self.object_of(cx, id).await?,
            _ => Some(self.make_object(cx, id).await?),
        };
        let Some(object) = object else { return Ok(()) };
        let last = match size {
            0 => None,
            _ => self.placement.pieces(object.key(), size - 1, 1).next().map(|(target, _)| target),
        };
        if let Some(target) = last {
            self.cut_last(cx, target, object, size).await?;
        }
        let others = self.targets_of(object).filter(|target| Some(*target) != last);
        let cuts = others
            .map(|target| Box::pin(self.cut_part(cx, target, object, size)) as Fut<'_, Result<()>>);
        dray_rt::join_all(cuts.collect()).await.into_iter().collect()
    }

    /// Gives the object that has the last byte the size of the file.
    async fn cut_last(
        &self,
        cx: &Context,
        target: ServerIndex,
        object: ObjectId,
        size: u64,
    ) -> Result<()> {
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        let entry = match self.find(cx, target, object).await? {
            Some(entry) => entry,
            None => self.make_part(cx, target, object).await?,
        };
        self.at(target).setattr(&step(cx, CUT_STEPS), entry.id, set).await.map(drop)
    }

    /// Makes an empty object. It may be there.
    async fn make_part(
        &self,
        cx: &Context,
        target: ServerIndex,
        object: ObjectId,
    ) -> Result<Entry> {
        let dir = self.shard(cx, target, object).await?;
        let what = Make::Node { mode: libc::S_IFREG | OBJECT_MODE, rdev: 0 };
        match self.at(target).make(&unrepeated(cx), dir, &object.file_name()?, what).await {
            Err(error) if error.errno() == Errno::EEXIST => {
                let found = self.find(cx, target, object).await?;
                found.ok_or_else(|| Error::new(Errno::ESTALE)) // the file is removed meanwhile
            }
            Err(error) => Err(self.of_shard(cx, (target, dir), error).await),
            Ok(entry) => Ok(entry),
        }
    }

    async fn cut_part(
        &self,
        cx: &Context,
        target: ServerIndex,
        object: ObjectId,
        size: u64,
    ) -> Result<()> {
        match self.find(cx, target, object).await? {
            Some(entry) if entry.attr.size > size => {
                let set = SetAttr { size: Some(size), ..SetAttr::default() };
                let number = CUT_STEPS + 1 + u32::from(target.0);
                self.at(target).setattr(&step(cx, number), entry.id, set).await.map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Gives all objects the times that the stub has been given.
    pub(super) async fn set_times(
        &self,
        cx: &Context,
        id: FileId,
        (set, stub): (SetAttr, Attr),
    ) -> Result<()> {
        if set.atime.is_none() && set.mtime.is_none() {
            return Ok(());
        }
        let Some(object) = self.object_of(cx, id).await? else { return Ok(()) };
        let times = SetAttr {
            atime: set.atime.map(|_| TimeSet::At(stub.atime)),
            mtime: set.mtime.map(|_| TimeSet::At(stub.mtime)),
            ..SetAttr::default()
        };
        for target in self.targets_of(object) {
            if let Some(entry) = self.find(cx, target, object).await? {
                let cx = step(cx, TIME_STEPS + u32::from(target.0));
                self.at(target).setattr(&cx, entry.id, times).await?;
            }
        }
        Ok(())
    }

    /// Removes the objects of a file that has lost a name, once the home no longer knows the file. Somebody
    /// who has it open does the same at the close. A client that dies before leaves the objects behind.
    pub(super) fn bury(self: &Arc<Self>, id: FileId, object: ObjectId) {
        let own = self.clone();
        dray_rt::spawn(async move {
            let cx = of_no_request();
            for wait in BURIAL_WAITS {
                if !wait.is_zero() {
                    dray_rt::sleep(wait).await;
                }
                match own.home().getattr(&cx, id).await {
                    Ok(attr) if attr.nlink > 0 => return,
                    Ok(_) => {}
                    Err(error) if error.errno() == Errno::ESTALE => {
                        own.forget(id);
                        return own.remove_objects(&cx, object).await;
                    }
                    Err(_) => return,
                }
            }
        });
    }

    async fn remove_objects(&self, cx: &Context, object: ObjectId) {
        let Ok(file_name) = object.file_name() else { return };
        for target in self.targets_of(object) {
            if let Ok(dir) = self.shard(cx, target, object).await {
                let removed = self.at(target).remove(cx, dir, &file_name, RemoveKind::File).await;
                let _ = removed; // it may never have been there, and what stays is found by a check
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_names_a_file_and_is_read_from_its_attribute() {
        let id = ObjectId(0xab00_0000_0000_0000_0000_0000_0000_0001);
        assert_eq!(id.to_string(), "ab000000000000000000000000000001");
        assert_eq!((id.shard(), id.key().ino >> 56, id.key().generation), (0xab, 0xab, 1));
        assert_eq!(ObjectId::from_attribute(&id.0.to_be_bytes()).unwrap(), id);
        for broken in [&b""[..], &[1; 15], &[1; 17]] {
            assert_eq!(ObjectId::from_attribute(broken).unwrap_err().errno(), Errno::EIO);
        }
    }
}
