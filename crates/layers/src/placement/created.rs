//! Files that were created at the server of their name, and are opened at their home.

use std::sync::Arc;

use dray_core::{Attr, Context, Entry, Errno, FileId, Fut, OpenFile, OpenHow, Result, SetAttr};

use super::file::PlacedFile;
use super::fs::PlacedFs;
use super::servers::{at_home, is_gone};
use super::slices::SliceIndex;

impl PlacedFs {
    /// Opens at its home server a file that was just created at the server of its name, where it is closed
    /// again. `created` was opened without `O_TRUNC`: only the home server may cut it, so that cuts
    /// and writes have one order. It `cuts` what may have been there before.
    pub(super) async fn move_home(
        &self,
        cx: &Context,
        (entry, created): (Entry, Arc<dyn OpenFile>),
        (answering, how): (SliceIndex, OpenHow),
        cuts: bool,
    ) -> Result<(Entry, Arc<dyn OpenFile>)> {
        let entry = self.shared.said_by(answering, entry);
        let home = self.shared.slices.home(entry.id);
        let placed = |file| PlacedFile::open(&self.shared, (home, how), file);
        if home == answering {
            if !cuts {
                return Ok((entry, placed(created)));
            }
            // The second change of the request at this server: a process after us must not take one's answer for
            // the other's.
            let attr = self.cut_created(&cx.part(1), entry, (&*created, how)).await;
            return match attr {
                Ok(attr) => Ok((Entry { attr, ..entry }, placed(created))),
                Err(error) => {
                    let _ = created.close(cx).await; // the first error counts
                    Err(error)
                }
            };
        }
        let opened = self.open_created(cx, entry, how, cuts).await;
        if opened.as_ref().is_err_and(is_gone) {
            // Removed in between: nobody else can find it, so that it may be used here.
            let at = (answering, how);
            return Ok((entry, PlacedFile::open(&self.shared, at, created)));
        }
        // A file without a name is gone once nobody has it open, so that this comes last.
        let closed = created.close(cx).await;
        let file = opened?;
        if let Err(error) = closed {
            let _ = file.close(cx).await; // the first error counts
            return Err(error);
        }
        let attr = file.at_open().map_or(entry.attr, |at_open| at_open.attr);
        let attr = attr.of_name(entry.attr.validity.name);
        Ok((Entry { attr, ..entry }, placed(file)))
    }

    /// Cuts a file that was opened or made without `O_TRUNC`, and answers its attributes then.
    async fn cut_created(
        &self,
        cx: &Context,
        entry: Entry,
        (file, how): (&dyn OpenFile, OpenHow),
    ) -> Result<Attr> {
        let OpenHow { kill_set_id, .. } = how;
        let set = SetAttr { size: Some(0), kill_set_id, ..SetAttr::default() };
        match file.setattr(cx, set).await {
            // Opened to be read: cutting it then takes the right to write to it, unless it is new.
            Err(error) if error.errno() == Errno::EINVAL => {}
            outcome => return outcome,
        }
        let id = entry.id;
        match at_home!(self, cx, id, setattr(cx, id, set)).await {
            Err(error) if error.errno() == Errno::EACCES && entry.attr.size == 0 => Ok(entry.attr),
            outcome => outcome,
        }
    }

    /// Opens a file at its home server. Its creator may use it whatever mode it was created with.
    async fn open_created(
        &self,
        cx: &Context,
        entry: Entry,
        how: OpenHow,
        cuts: bool,
    ) -> Result<Arc<dyn OpenFile>> {
        let how = OpenHow { with_attr: true, ..how };
        if cuts {
            match self.open_home(cx, entry.id, how).await {
                // New, since it is empty, and of a mode that allows its creator no more opens.
                Err(error) if error.errno() == Errno::EACCES && entry.attr.size == 0 => {}
                outcome => return outcome,
            }
        }
        self.open_home(cx, entry.id, how.of_created()).await
    }

    fn open_home<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        at_home!(self, cx, id, open(cx, id, how))
    }
}
