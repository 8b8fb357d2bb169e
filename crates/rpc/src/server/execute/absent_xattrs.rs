//! What a page of a listing says of extended attributes that its files do not have.

use std::time::Duration;

use dray_core::{Context, DirPage, Errno, FileId, FileSystem, FileType};

use dray_rt::now;

use crate::server::as_server;
use crate::wire::{AbsentXattrs, LISTED_XATTRS};

/// How long a page may take longer for it. A file system of a network is asked for each file. Of the rest nothing is
/// said.
const LOOKING_MAX: Duration = Duration::from_millis(100);

/// Whether the file system answers `ENODATA` for an attribute that a file does not have: by the type of the
/// file, for each of [`LISTED_XATTRS`]. One that knows no such attribute answers something else. It
/// is asked once for a page.
#[derive(Default)]
struct NoDataAnswers([[Option<bool>; LISTED_XATTRS.len()]; 2]);

impl NoDataAnswers {
    async fn is_no_data(
        &mut self,
        (fs, cx): (&dyn FileSystem, &Context),
        (id, is_dir): (FileId, bool),
        index: usize,
    ) -> bool {
        let known = &mut self.0[usize::from(is_dir)][index];
        if let Some(known) = *known {
            return known;
        }
        let got = fs.getxattr(cx, id, LISTED_XATTRS[index]).await;
        *known.insert(got.is_err_and(|error| error.errno() == Errno::ENODATA))
    }
}

/// One for each entry. It is looked at as the server: what it does not see nobody has, and nothing else of
/// a file is shown.
pub(super) async fn of_page(
    fs: &dyn FileSystem,
    cx: &Context,
    page: &DirPage,
) -> Vec<AbsentXattrs> {
    let cx = as_server::to_look(cx);
    let begun = now();
    let (mut answers, mut all) = (NoDataAnswers::default(), Vec::with_capacity(page.len()));
    for (_, entry) in page.iter() {
        let in_time = begun.elapsed() < LOOKING_MAX;
        let kind = entry.attr.map(|attr| attr.file_type()).filter(|_| in_time);
        all.push(match kind {
            Some(FileType::Regular | FileType::Directory) => {
                let file = (entry.id, kind == Some(FileType::Directory));
                of_file((fs, &cx), file, &mut answers).await
            }
            // Of links and devices file systems know other attributes, and listings ask for none.
            Some(
                FileType::Fifo
                | FileType::CharDevice
                | FileType::BlockDevice
                | FileType::Symlink
                | FileType::Socket,
            )
            | None => AbsentXattrs::UNKNOWN,
        });
    }
    all
}

async fn of_file(
    (fs, cx): (&dyn FileSystem, &Context),
    (id, is_dir): (FileId, bool),
    answers: &mut NoDataAnswers,
) -> AbsentXattrs {
    let Ok(list) = fs.listxattr(cx, id).await else { return AbsentXattrs::UNKNOWN };
    let mut absent = if list.is_empty() { AbsentXattrs::ALL } else { AbsentXattrs::UNKNOWN };
    for (index, name) in LISTED_XATTRS.into_iter().enumerate() {
        if !list.split(|byte| *byte == 0).any(|there| there == name)
            && answers.is_no_data((fs, cx), (id, is_dir), index).await
            && let Some(this) = AbsentXattrs::of(name)
        {
            absent = absent.with(this);
        }
    }
    absent
}
