//! One client gives a name to one file after the other, and keeps the former ones. The others open
//! what they have once found by the name. It must be opened if it has the name, and neither opened
//! nor cut if it has not.

use std::collections::HashMap;
use std::sync::Mutex;

use dray_core::{Buf, Errno, FileId, FileSystem, Fut, OpenHow, RenameHow, Write};

use super::{Workload, lock, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::{SimClient, name};

/// Files that have the name in turn.
const FILES: u64 = 20;
/// Openings of each client.
const OPENINGS: u64 = 40;
const NAME: &str = "name";
const CONTENT: &[u8] = b"content";

/// What the clients can know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct NameState {
    /// What has the name; none while it is being given to another, or nobody knows.
    file: Option<FileId>,
    /// Changes so far.
    changes: u64,
}

/// Openings that cut a file.
#[derive(Clone, Copy, Debug, Default)]
struct Cuts {
    /// Not known to have been made.
    unknown: u32,
    made: u32,
}

#[derive(Default)]
pub(super) struct CachedNames {
    state: Mutex<NameState>,
    /// Every file that had the name.
    files: Mutex<HashMap<FileId, Cuts>>,
}

impl CachedNames {
    fn record(&self, file: Option<FileId>) {
        let mut state = lock(&self.state);
        *state = NameState { file, changes: state.changes + 1 };
    }

    async fn rename(&self, client: &SimClient, from: &str, to: &str) -> Outcome<()> {
        let (from, to) = (name(from), name(to));
        let (from, to) = ((client.root(), &*from), (client.root(), &*to));
        let renamed = client.fs.rename(&client.cx(), from, to, RenameHow::NoReplace).await;
        renamed.map_err(client.failed("rename"))
    }

    async fn make(&self, client: &SimClient, text: &str) -> Outcome<FileId> {
        let failed = client.failed("make");
        let file = client.open(client.root(), text, libc::O_RDWR).await?;
        file.write(&client.cx(), Write::at(0), Buf::from(CONTENT)).await.map_err(&failed)?;
        file.close(&client.cx()).await.map_err(&failed)?;
        Ok(file.id())
    }

    async fn give(&self, client: &SimClient) -> Outcome<()> {
        for number in 1..=FILES {
            let new = format!("file{number}");
            let file = self.make(client, &new).await?;
            lock(&self.files).insert(file, Cuts::default());
            self.record(None);
            if number > 1 {
                self.rename(client, NAME, &format!("kept{}", number - 1)).await?;
            }
            self.rename(client, &new, NAME).await?;
            self.record(Some(file));
            think().await;
            think().await;
        }
        Ok(())
    }

    /// Opens `file` by the name. False if the name has to be looked up again.
    async fn open(&self, client: &SimClient, file: FileId) -> Outcome<bool> {
        let failed = |what| Err(format!("client {} {what}", client.number));
        let cut = pick(3) == 0;
        let flags = if cut { libc::O_RDWR | libc::O_TRUNC } else { libc::O_RDONLY };
        let before = *lock(&self.state);
        self.note(file, |cuts| cuts.unknown += u32::from(cut));
        let (cx, named) = (client.cx(), name(NAME));
        let place = (client.root(), &*named);
        let opened = client.fs.open_named(&cx, place, file, OpenHow::new(flags)).await;
        let named_then = before.file.filter(|_| *lock(&self.state) == before);
        let open = match opened {
            Ok(open) if named_then.is_none_or(|named| named == file) => Some(open),
            Ok(_) => return failed("opened what had lost the name"),
            Err(error) if error.errno() != Errno::ESTALE => {
                return Err(client.failed("open")(error));
            }
            Err(_) if named_then == Some(file) => return failed("did not find what has the name"),
            Err(_) => None,
        };
        self.note(file, |cuts| {
            cuts.unknown -= u32::from(cut);
            cuts.made += u32::from(cut && open.is_some());
        });
        if let Some(open) = &open {
            open.close(&client.cx()).await.map_err(client.failed("close"))?;
        }
        Ok(open.is_some())
    }

    fn note(&self, file: FileId, change: impl FnOnce(&mut Cuts)) {
        change(lock(&self.files).entry(file).or_default());
    }

    async fn go_by(&self, client: &SimClient) -> Outcome<()> {
        let mut believed = None;
        for _ in 0..OPENINGS {
            let file = match believed {
                Some(file) => file,
                None => match client.lookup(client.root(), NAME).await {
                    Ok(entry) => entry.id,
                    Err(error) if error.errno() == Errno::ENOENT => {
                        think().await;
                        continue;
                    }
                    Err(error) => return Err(client.failed("look up")(error)),
                },
            };
            think().await;
            believed = self.open(client, file).await?.then_some(file);
        }
        Ok(())
    }
}

impl Workload for CachedNames {
    fn name(&self) -> &'static str {
        "believed"
    }

    fn bears_crashes(&self) -> bool {
        true
    }

    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            match client.number {
                0 => self.give(client).await,
                _ => self.go_by(client).await,
            }
        })
    }

    fn crashed(&self, number: usize) {
        if number == 0 {
            self.record(None); // nobody knows
        }
    }

    fn verify<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let files = lock(&self.files).clone();
            for (file, cuts) in files {
                let attr = client.fs.getattr(&client.cx(), file).await;
                let size = attr.map_err(client.failed("look at a file"))?.size;
                let whole = size == CONTENT.len() as u64;
                match cuts {
                    Cuts { unknown: 0, made: 0 } if !whole => {
                        return Err("a file was cut by openings that failed".into());
                    }
                    Cuts { made: 1.., .. } if size != 0 => {
                        return Err("a file was opened to be cut, and was not".into());
                    }
                    _ => {}
                }
            }
            Ok(())
        })
    }
}
