//! Lookups: at the server of the name, and at the home of the file that has it.

use dray_core::{Attr, Context, Entry, Fate, FileId, FileType, Name, Result};

use super::last_lookups::NameKey;
use super::servers::PlacedServers;
use super::slices::SliceIndex;

impl PlacedServers {
    /// A lookup at the directory's server.
    pub(super) async fn look_at(
        &self,
        cx: &Context,
        at: SliceIndex,
        (dir, name): (FileId, &Name),
    ) -> Result<Entry> {
        let entry = self.taught(cx, (at, [dir]), || self.at(at).lookup(cx, dir, name)).await?;
        self.met((dir, name), &entry);
        Ok(entry)
    }

    /// A lookup at the directory's server, for a caller who may open the file next. It is opened ahead at its home
    /// only. Answers the home, too.
    pub(super) async fn look_first(
        &self,
        cx: &Context,
        (at, key): (SliceIndex, NameKey),
        (dir, name): (FileId, &Name),
    ) -> Result<(Entry, SliceIndex)> {
        let expected = self.places.guesses.of(key);
        let looked = match expected == Some(at) || self.slices.count() == 1 {
            true => self.look_at(cx, at, (dir, name)).await,
            false => self.look_at(&cx.only_looking(), at, (dir, name)).await,
        };
        self.looked_up(cx, key, looked.as_ref());
        let entry = looked?;
        let home = self.slices.home(entry.id);
        if expected != Some(home) {
            self.places.guesses.note(key, home);
        }
        Ok((entry, home))
    }

    /// What [`look_first`](Self::look_first) has found at another server than the home, with the attributes that
    /// the home has. The home looks at the name of a regular file, because it may open the file then. What it finds
    /// counts if it is the same file. The home is asked behind the name's server, so that both leases on the attributes count (ADR 0056). What the
    /// home leases of the name counts for nothing: another server changes it.
    pub(super) async fn look_at_home(
        &self,
        cx: &Context,
        (entry, home): (Entry, SliceIndex),
        (dir, name): (FileId, &Name),
    ) -> Result<Entry> {
        let regular = entry.attr.file_type() == FileType::Regular;
        if regular && !self.learn() {
            if let Some(attr) = self.leased(entry.id) {
                return Ok(with_attributes(entry, attr));
            }
            match self.at(home).lookup(cx, dir, name).await {
                Ok(found) if found.id == entry.id => return Ok(with_attributes(entry, found.attr)),
                // The server has said nothing.
                Err(error) if error.fate() != Fate::Final => return Err(error),
                Ok(_) | Err(_) => {}
            }
        }
        Ok(with_attributes(entry, self.getattr(cx, entry.id).await?))
    }

    /// The attributes of `entry` as its home server has them, which `answering` may not be. The file
    /// systems below may cache attributes, so those of another server can be old.
    pub(super) async fn at_home(
        &self,
        cx: &Context,
        entry: Entry,
        answering: SliceIndex,
    ) -> Result<Entry> {
        if self.slices.home(entry.id) == answering {
            return Ok(entry);
        }
        Ok(with_attributes(entry, self.getattr(cx, entry.id).await?))
    }
}

/// An entry with the attributes that its home has. Of the name the name's server says how long it holds.
fn with_attributes(entry: Entry, attr: Attr) -> Entry {
    Entry { id: entry.id, attr: attr.of_name(entry.attr.validity.name) }
}
