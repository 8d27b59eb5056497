#!lua name=kvatlas
-- The index in Redis: path-compressed segments of at most one band (128 blocks) of one chain; index/README.md has
-- the key and value tables. Every key of a shard starts with the shard's hash tag; KEYS[1] is its incarnation key,
-- and the others are derived from it, so a shard lives on one node of a cluster.
--
-- Segment, key "…s" + 8-byte hash of its first block:
--   u8 blocks | hash of its last block | hash of the band's first block | u32 branches | u16 plain holders
--   | u32 bytes of other holders | both
--   plain holder: u16 slot | u8 length | u16 residency              has [0, length)
--   other holder: u16 slot | u8 runs | runs x (u8 start | u8 length | u16 residency)
-- and its hashes, key "…h" + 8-byte hash of its first block: blocks x 8 bytes.
-- A branch does not split a segment: it starts its own, named by its first block. A walk that leaves a segment goes on
-- with the segment named by the next block. The band's first segment counts the others of its band, and stays, if need
-- be without holders, until they are gone: where it is missing there are none, and where it has no branches a walk
-- that leaves it is over.
--
-- Debian's Redis hashes every byte of every string that Lua makes (2 us a KB; Valkey 0.5), so strings are kept short:
-- hashes have a key of their own and are read only where chains part.

local BAND = 128
local HEADER = 27
local MANY = 8 -- segments of one MGET
local NOTHING_NEEDED = 4294967295
local MAX_SLOT = 16383

-- Redis shows its Lua libraries only while a function runs, not while the library loads.
local sub, byte, char, concat, find, call, pack, unpack, unpack_list
local function init()
  sub, byte, char, concat = string.sub, string.byte, string.char, table.concat
  find, call, unpack_list = string.find, redis.call, _G.unpack
  pack, unpack = struct.pack, struct.unpack
end

local function u16(x)
  return char(x % 256, (x - x % 256) / 256)
end

local function stale()
  return redis.error_reply('KVSTALE the store has no data of this incarnation')
end

-- how many of the first `high` hashes of a segment equal those of a chain from byte `at` on; the first one does
local function equal_blocks(base, name, chain, at, high)
  local hashes, low = call('GET', base .. 'h' .. name) or '', 1
  while low < high do
    local middle = (low + high + 1 - (low + high + 1) % 2) / 2
    if sub(hashes, middle * 8 - 7, middle * 8) == sub(chain, at + middle * 8 - 7, at + middle * 8) then
      low = middle
    else
      high = middle - 1
    end
  end
  return low
end

---------------------------------------------------------------- reading

-- A reply's piece: where on the chain a segment begins, how much of it matches, and its holders as they stand (what
-- follows byte 21 of its value). Where the reader has to compare, hashes go with it.
local function piece(position, blocks, holders)
  return pack('<IIB', position, blocks, 0) .. holders
end

local function unequal_piece(position, hashes, holders)
  return pack('<IIB', position, 0, #hashes / 8) .. holders .. hashes
end

-- whether every holder has the whole band
local function all_whole(holders)
  local _, other = unpack('<HI', holders)
  if other > 0 then return false end
  for o = 9, #holders, 5 do
    if byte(holders, o) ~= BAND then return false end
  end
  return true
end

-- Walk a stretch of the chain, which begins with a band, from segment to segment and append their pieces to `out`.
-- Returns false where more than `gap` blocks in a row of one band are in no segment: the walk is over.
local function walk(base, chain, position, gap, out)
  local total = #chain / 8
  local pos, missing = 0, 0
  while pos < total do
    if pos % BAND == 0 then missing = 0 end
    local name = sub(chain, pos * 8 + 1, pos * 8 + 8)
    local segment = call('GET', base .. 's' .. name)
    if segment then
      local blocks = byte(segment)
      -- the last block's chained hash vouches for all before it
      if pos + blocks > total or sub(segment, 2, 9) ~= sub(chain, (pos + blocks) * 8 - 7, (pos + blocks) * 8) then
        if pos + blocks > total then blocks = total - pos end
        blocks = equal_blocks(base, name, chain, pos * 8, blocks)
      end
      out[#out + 1] = piece(position + pos, blocks, sub(segment, 22))
      pos, missing = pos + blocks, 0
    else
      pos, missing = pos + 1, missing + 1
      if missing > gap then return false end
    end
  end
  return true
end

-- Walk whole bands of which only the first hashes (and behind them the last ones) are given. Bands that the same
-- holders have as a whole become one piece.
-- Returns whether the walk goes on, and the position of a band whose hashes are needed for that.
local function walk_bands(base, ends, position, gap, out)
  local bands = #ends / 16
  local begin, whole -- of the piece that is open: where it begins, and its holders if they have all of it
  for from = 0, bands - 1, MANY do
    local names = {}
    for band = from, from + MANY - 1 do
      if band < bands then names[#names + 1] = base .. 's' .. sub(ends, band * 8 + 1, band * 8 + 8) end
    end
    local segments = call('MGET', unpack_list(names))
    for n = 1, #names do
      local segment, start = segments[n], position + (from + n - 1) * BAND
      if not segment then return false end -- nor is any other of the band
      local last, holders = (bands + from + n) * 8, sub(segment, 22)
      if byte(segment) == BAND and sub(segment, 2, 9) == sub(ends, last - 7, last) then
        if holders == whole then
          out[#out] = piece(begin, start + BAND - begin, holders)
        else
          out[#out + 1] = piece(start, BAND, holders)
          begin, whole = start, all_whole(holders) and holders
        end
      else
        local a, b, c, d = byte(segment, 18, 21)
        if a + b + c + d > 0 then return false, start end
        local first = (from + n) * 8
        local hashes = call('GET', base .. 'h' .. sub(ends, first - 7, first))
        if hashes then out[#out + 1] = unequal_piece(start, hashes, holders) end
        whole = nil
        if gap == 0 then return false end
      end
    end
  end
  return true
end

-- args: how many blocks of a band in a row that no segment has do not end the walk; which of the stretches is given by
-- the ends of its bands only (0: none); then the stretches of the chain, one behind the other: packed hashes, or the
-- first hashes of its bands and then their last ones (for a gap shorter than a band).
-- Returns u32 table version | u32 position of the band whose hashes are needed to go on, 2^32 - 1 where none is |
-- for each segment on the way: u32 position | u32 blocks that match | u8 hashes | u16 plain holders
-- | u32 bytes of other holders | both | hashes, which the reader compares where the blocks are 0. Of more blocks than a
-- band has, all holders named have all.
-- Positions are counted from the first stretch's first block. Slots are told as they stand, dead ones too: the reader
-- knows from the table of that version which ones count.
local function find_segments(keys, args)
  local base = sub(keys[1], 1, -2)
  local known = call('MGET', keys[1], base .. 'v')
  if not known[1] then return stale() end
  local gap, by_ends = tonumber(args[1]), tonumber(args[2])
  local position, needed, out = 0, nil, {''}
  for n = 1, #args - 2 do
    local stretch, more = args[n + 2], nil
    if n == by_ends then
      more, needed = walk_bands(base, stretch, position, gap, out)
      position = position + #stretch / 16 * BAND
    else
      more = walk(base, stretch, position, gap, out)
      position = position + #stretch / 8
    end
    if not more then break end
  end
  out[1] = pack('<II', tonumber(known[2] or '0'), needed or NOTHING_NEEDED)
  return concat(out)
end

---------------------------------------------------------------- segments in hand, written back together

-- what a call has read and changed: segments by their first hash (false: there is none), and the changed ones
local function new_hand(base)
  return {base = base, segments = {}, changed = {}}
end

local function segment_of(hand, first)
  local segment = hand.segments[first]
  if segment ~= nil then return segment end
  local v = call('GET', hand.base .. 's' .. first)
  if v then
    local blocks, last, trunk, branches, plain = unpack('<Bc8c8IH', v)
    local plain_end = HEADER + plain * 5
    segment = {
      first = first,
      blocks = blocks,
      last = last,
      trunk = trunk,
      branches = branches,
      plain = sub(v, HEADER + 1, plain_end),
      other = sub(v, plain_end + 1),
      changed = false,
      lost = false, -- somebody lost blocks at its end
    }
  else
    segment = false
  end
  hand.segments[first] = segment
  return segment
end

local function set_changed(hand, segment)
  if segment.changed then return end
  segment.changed = true
  hand.changed[#hand.changed + 1] = segment
end

-- a segment without blocks, counted as a branch of its band's first one unless it is that
local function begin_segment(hand, first, trunk)
  local segment = {
    first = first, blocks = 0, last = '', trunk = trunk, branches = 0, plain = '', other = '',
    changed = false, lost = false,
  }
  hand.segments[first] = segment
  if first ~= trunk then
    local top = segment_of(hand, trunk)
    top.branches = top.branches + 1
    set_changed(hand, top)
  end
  return segment
end

-- more hashes for a segment. APPEND leaves room for as much again, so one that cannot grow any more is written anew
local function add_hashes(hand, segment, hashes)
  local key = hand.base .. 'h' .. segment.first
  local blocks = segment.blocks + #hashes / 8
  if segment.blocks == 0 then
    call('SET', key, hashes)
  elseif blocks < BAND then
    call('APPEND', key, hashes)
  else
    call('SET', key, (call('GET', key) or '') .. hashes)
  end
  segment.blocks, segment.last = blocks, sub(hashes, -8)
  set_changed(hand, segment)
end

-- how many of the segment's blocks anybody has
local function held(segment)
  local keep = 0
  local plain, other = segment.plain, segment.other
  for o = 3, #plain, 5 do
    local len = byte(plain, o)
    if len > keep then keep = len end
  end
  local o = 1
  while o <= #other do
    local runs = byte(other, o + 2)
    local start, len = byte(other, o + 3 + (runs - 1) * 4, o + 4 + (runs - 1) * 4)
    if start + len > keep then keep = start + len end
    o = o + 3 + runs * 4
  end
  return keep
end

-- Write a changed segment, without the blocks at its end that nobody has any more. Returns whether it is gone.
local function put_segment(hand, segment)
  local base, first = hand.base, segment.first
  local nobody = #segment.plain + #segment.other == 0
  if nobody and segment.branches == 0 then
    call('DEL', base .. 's' .. first, base .. 'h' .. first)
    return true
  end
  if segment.lost or nobody then
    local keep = nobody and 1 or held(segment) -- one block for its branches
    if keep < segment.blocks then
      local hashes = call('GETRANGE', base .. 'h' .. first, 0, keep * 8 - 1)
      call('SET', base .. 'h' .. first, hashes)
      segment.blocks, segment.last = keep, sub(hashes, -8)
    end
  end
  local head = pack(
    '<Bc8c8IHI', segment.blocks, segment.last, segment.trunk, segment.branches, #segment.plain / 5, #segment.other)
  call('SET', base .. 's' .. first, head .. segment.plain .. segment.other)
  return false
end

local function put_hand(hand)
  for _, segment in ipairs(hand.changed) do
    if segment.first ~= segment.trunk and put_segment(hand, segment) then
      local top = segment_of(hand, segment.trunk)
      if top and top.branches > 0 then
        top.branches = top.branches - 1
        set_changed(hand, top)
      end
    end
  end
  for _, segment in ipairs(hand.changed) do
    if segment.first == segment.trunk then put_segment(hand, segment) end
  end
end

---------------------------------------------------------------- holders of a segment

local function find_plain(plain, id)
  local from = 1
  while true do
    local at = find(plain, id, from, true)
    if not at then return nil end
    if at % 5 == 1 then return at end
    from = at + 1
  end
end

local function find_other(other, id)
  local o = 1
  while o <= #other do
    local size = 3 + byte(other, o + 2) * 4
    if sub(other, o, o + 1) == id then return o, size end
    o = o + size
  end
end

-- take a holder out of a segment; returns its runs: start, end, residency of each, one behind the other
local function take_holder(segment, id)
  local runs = {}
  local at = find_plain(segment.plain, id)
  if at then
    local len, c, d = byte(segment.plain, at + 2, at + 4)
    runs = {0, len, c + d * 256}
    segment.plain = sub(segment.plain, 1, at - 1) .. sub(segment.plain, at + 5)
    return runs
  end
  local o, size = find_other(segment.other, id)
  if o then
    for k = o + 3, o + size - 4, 4 do
      local start, len, c, d = byte(segment.other, k, k + 3)
      runs[#runs + 1] = start
      runs[#runs + 1] = start + len
      runs[#runs + 1] = c + d * 256
    end
    segment.other = sub(segment.other, 1, o - 1) .. sub(segment.other, o + size)
  end
  return runs
end

local function put_holder(segment, id, runs)
  if #runs == 3 and runs[1] == 0 then
    segment.plain = segment.plain .. id .. char(runs[2]) .. u16(runs[3])
  elseif #runs > 0 then
    local packed = {id, char(#runs / 3)}
    for k = 1, #runs, 3 do
      packed[#packed + 1] = char(runs[k], runs[k + 1] - runs[k]) .. u16(runs[k + 2])
    end
    segment.other = segment.other .. concat(packed)
  end
end

-- the runs with blocks [a, b) at residency res, equal neighbours joined
local function with_run(runs, a, b, res)
  local out, n = {}, 0
  local function add(start, stop, value)
    if value == 0 or start >= stop then return end
    if n > 0 and out[n - 1] == start and out[n] == value then
      out[n - 1] = stop
    else
      out[n + 1], out[n + 2], out[n + 3] = start, stop, value
      n = n + 3
    end
  end
  local added = false
  for k = 1, #runs, 3 do
    local start, stop, value = runs[k], runs[k + 1], runs[k + 2]
    add(start, stop < a and stop or a, value)
    if stop > a and not added then
      add(a, b, res)
      added = true
    end
    add(start > b and start or b, stop, value)
  end
  if not added then add(a, b, res) end
  return out
end

-- holder `id` now has the segment's blocks [a, b) with residency res; 0: not any more
local function mark(hand, segment, id, a, b, res)
  local plain = segment.plain
  local at = find_plain(plain, id)
  if at then
    local len, c, d = byte(plain, at + 2, at + 4)
    if a <= len and res == c + d * 256 then
      if b <= len then return end
      segment.plain = sub(plain, 1, at + 1) .. char(b) .. sub(plain, at + 3)
      set_changed(hand, segment)
      return
    end
    if a >= len and res == 0 then return end
  elseif a == 0 and res ~= 0 and segment.other == '' then
    segment.plain = plain .. id .. char(b) .. u16(res)
    set_changed(hand, segment)
    return
  elseif res == 0 and (segment.other == '' or not find_other(segment.other, id)) then
    return
  end
  if res == 0 then segment.lost = true end
  put_holder(segment, id, with_run(take_holder(segment, id), a, b, res))
  set_changed(hand, segment)
end

---------------------------------------------------------------- runs of blocks

-- Position (in blocks) of the first of the chain's blocks [from, to) that names a segment, or nil. `at`: byte of the
-- blob before the chain.
local function next_segment(hand, blob, at, from, to)
  local names, positions, in_hand = {}, {}, nil
  for i = from, to - 1 do
    local name = sub(blob, at + i * 8 + 1, at + i * 8 + 8)
    local segment = hand.segments[name]
    if segment then
      in_hand = i
      break
    elseif segment == nil then
      names[#names + 1] = hand.base .. 's' .. name
      positions[#positions + 1] = i
    end
  end
  if #names == 0 or call('EXISTS', unpack_list(names)) == 0 then return in_hand end
  for n, name in ipairs(names) do
    if call('EXISTS', name) == 1 then return positions[n] end
  end
end

-- A holder's blocks [first, total) of a chain now have residency res. The chain starts at its band's first block, and
-- at byte `at` + 1 of the blob.
local function write_run(hand, id, first, blob, at, total, res)
  local trunk = sub(blob, at + 1, at + 8)
  local top = segment_of(hand, trunk)
  local pos = 0
  while pos < total do
    local name = sub(blob, at + pos * 8 + 1, at + pos * 8 + 8)
    local segment = segment_of(hand, name)
    if not segment and res == 0 then
      pos = top and top.branches > 0 and next_segment(hand, blob, at, pos + 1, total) or total
    else
      if not segment then
        segment = begin_segment(hand, name, trunk)
        top = top or segment
      end
      local n = segment.blocks
      local same = n
      if n > 0 and (pos + n > total or sub(blob, at + (pos + n) * 8 - 7, at + (pos + n) * 8) ~= segment.last) then
        if pos + n > total then n = total - pos end
        same = equal_blocks(hand.base, name, blob, at + pos * 8, n)
      end
      if same == segment.blocks and pos + same < total and res ~= 0 then
        -- append what is new, up to the next block that already names a segment
        local from, stop = pos + (same > 0 and same or 1), total
        if top.branches > 0 and from < total then stop = next_segment(hand, blob, at, from, total) or total end
        if stop > pos + same then
          add_hashes(hand, segment, sub(blob, at + (pos + same) * 8 + 1, at + stop * 8))
          same = stop - pos
        end
      end
      local a = first - pos
      if a < same then mark(hand, segment, id, a > 0 and a or 0, same, res) end
      pos = pos + same
    end
  end
end

---------------------------------------------------------------- applying a flush

-- Slots that holders have now. A sweep leaves them alone.
local function set_live(base, slot, on)
  call('SETBIT', base .. 'l', slot, on)
end

local function is_live(base, slot)
  return call('GETBIT', base .. 'l', slot) == 1
end

-- fence of a holder, field of "…f": "life epoch slot sequence broken"
local function read_fence(base, holder)
  local text = call('HGET', base .. 'f', holder)
  if not text then return nil end
  local life, epoch, slot, sequence, broken = string.match(text, '^(%d+) (%d+) (%d+) (%d+) (%d)$')
  return {
    life = tonumber(life), epoch = tonumber(epoch), slot = tonumber(slot),
    sequence = tonumber(sequence), broken = tonumber(broken),
  }
end

local function write_fence(base, holder, fence)
  call('HSET', base .. 'f', holder, string.format(
    '%.0f %.0f %d %.0f %d', fence.life, fence.epoch, fence.slot, fence.sequence, fence.broken))
end

-- One write of a blob, from byte `at` on, without its runs:
--   u16 bytes of the holder's name | u64 life | u64 epoch | u8 whether the records say the epoch | u16 slot
--   | u64 first sequence | u64 last sequence | u8 sources | u32 runs | u32 bytes of the profile | name | profile
--   | sources x (u8 bytes | source | u64 engine sequence)
-- Returns it and the byte where its runs begin.
local function read_write(blob, at)
  local name_size, life, epoch, said, slot, first, last, sources, runs, profile_size
  name_size, life, epoch, said, slot, first, last, sources, runs, profile_size, at =
    unpack('<HI8I8BHI8I8BII', blob, at)
  local holder = sub(blob, at, at + name_size - 1)
  at = at + name_size
  local profile = sub(blob, at, at + profile_size - 1)
  at = at + profile_size
  local told = {} -- fields of "…a" and their values
  for _ = 1, sources do
    local size = byte(blob, at)
    local source = sub(blob, at + 1, at + size)
    local sequence
    sequence, at = unpack('<I8', blob, at + size + 1)
    told[#told + 1] = holder .. '\0' .. source
    told[#told + 1] = string.format('%.0f %.0f', life, sequence)
  end
  return {
    holder = holder, life = life, epoch = epoch, said = said, slot = slot, first = first, last = last, runs = runs,
    profile = profile, told = told,
  }, at
end

-- what becomes of a write behind its holder's fence: applied, repeated (it was before), or refused (its life is over)
local function verdict_of(write, fence)
  if not fence or write.life > fence.life then return 'applied' end
  if write.life < fence.life then return 'refused' end
  if write.epoch < fence.epoch or (write.epoch == fence.epoch and write.last <= fence.sequence) then
    return 'repeated'
  end
  return 'applied'
end

-- Open a write's epoch, where it is not the fence's.
-- Returns the fence of the write's epoch, whether that begins, and whether records before the write are lost.
local function open_epoch(base, write, fence)
  if fence and write.life == fence.life and write.epoch == fence.epoch then
    local gap = write.first > fence.sequence + 1 and fence.broken == 0
    if gap then fence.broken = 1 end
    return fence, false, gap
  end
  if fence then
    set_live(base, fence.slot, 0)
    call('SADD', base .. 'd', fence.slot)
    if write.life > fence.life then
      call('HDEL', base .. 'b', write.holder)
      call('HDEL', base .. 'p', write.holder)
    end
  end
  set_live(base, write.slot, 1)
  -- a life must be seen from its first record on, or from a clear
  local whole = write.first == 1 or write.epoch == write.first
  fence = {life = write.life, epoch = write.epoch, slot = write.slot, sequence = 0, broken = whole and 0 or 1}
  return fence, true, not whole
end

-- a cursor only ever goes forward
local function move_cursor(base, field, offset)
  if field == '' then return end
  local known = tonumber(call('HGET', base .. 'c', field) or '-1')
  if tonumber(offset) > known then call('HSET', base .. 'c', field, offset) end
end

-- args: incarnation, cursor field ('' for none), cursor offset, packed writes, each as `read_write` reads it and then
-- its runs: u8 first block | u16 residency | u16 bytes of the chain | chain.
-- Returns applied writes, repeats, refused lives, holders found with a gap.
local function apply(keys, args)
  local base = sub(keys[1], 1, -2)
  if call('GET', keys[1]) ~= args[1] then return stale() end
  local blob, at = args[4], 1
  local counts, gaps = {applied = 0, repeated = 0, refused = 0}, 0
  local moved = false -- what readers keep of the table of slots is out of date
  local hand = new_hand(base)
  while at <= #blob do
    local write
    write, at = read_write(blob, at)
    local fence = read_fence(base, write.holder)
    -- another worker may have begun an epoch since this one looked
    if write.said == 0 and fence and fence.life == write.life then write.epoch = fence.epoch end
    local verdict = verdict_of(write, fence)
    counts[verdict] = counts[verdict] + 1
    local taken, id = verdict == 'applied', nil
    if taken then
      local begun, gap
      fence, begun, gap = open_epoch(base, write, fence)
      moved = moved or begun
      if gap then gaps = gaps + 1 end
      id = u16(fence.slot)
    end
    for _ = 1, write.runs do
      local first, res, size
      first, res, size, at = unpack('<BHH', blob, at)
      if taken then write_run(hand, id, first, blob, at - 1, size / 8, res) end
      at = at + size
    end
    if taken then
      fence.sequence = write.last
      write_fence(base, write.holder, fence)
      if #write.told > 0 then call('HSET', base .. 'a', unpack_list(write.told)) end
      if write.profile ~= '' then
        call('HSET', base .. 'p', write.holder, write.profile)
        moved = true
      end
    end
  end
  put_hand(hand)
  move_cursor(base, args[2], args[3])
  if moved then call('INCR', base .. 'v') end
  return {counts.applied, counts.repeated, counts.refused, gaps}
end

-- Redis' own time in ms
local function now_ms()
  local now = call('TIME')
  return string.format('%.0f', now[1] * 1000 + (now[2] - now[2] % 1000) / 1000)
end

-- args: incarnation, then triples (holder, life and last sequence as "life sequence", packed heartbeat).
-- The heartbeat is kept with its arrival; one that knows of records that never came marks a gap. A life that the
-- holder does not have is not heard: `apply` begins it before.
local function beat(keys, args)
  local base = sub(keys[1], 1, -2)
  if call('GET', keys[1]) ~= args[1] then return stale() end
  local stamp = now_ms()
  local gaps = 0
  for i = 2, #args, 3 do
    local fence = read_fence(base, args[i])
    local life, sequence = string.match(args[i + 1], '^(%d+) (%d+)$')
    if fence and tonumber(life) == fence.life then
      if tonumber(sequence) > fence.sequence and fence.broken == 0 then
        fence.broken = 1
        write_fence(base, args[i], fence)
        gaps = gaps + 1
      end
      call('HSET', base .. 'b', args[i], stamp .. ' ' .. args[i + 2])
    end
  end
  return gaps
end

-- args: incarnation to be, then triples (holder, profile, packed heartbeat). Begins an empty shard, unless it has an
-- incarnation, with holders that are expected to be heard: they have no fence yet. Only shard 0 knows them.
local function begin(keys, args)
  local base = sub(keys[1], 1, -2)
  if not call('SET', keys[1], args[1], 'NX') then return end
  -- readers keep the table of a version, so that no other incarnation may have had that version
  call('SET', base .. 'v', tonumber(sub(args[1], 1, 7), 16))
  local stamp = now_ms()
  for i = 2, #args, 3 do
    call('HSET', base .. 'p', args[i], args[i + 1])
    call('HSET', base .. 'b', args[i], stamp .. ' ' .. args[i + 2])
  end
end

---------------------------------------------------------------- slots

-- args: incarnation, holder, life, epoch. Returns the slot of that epoch, -1 where a higher life exists, -2 where
-- none is free. Only shard 0 allocates.
local function take_slot(keys, args)
  local base = sub(keys[1], 1, -2)
  if call('GET', keys[1]) ~= args[1] then return stale() end
  local life, epoch = tonumber(args[3]), tonumber(args[4])
  local known = call('HGET', base .. 'o', args[2])
  if known then
    local known_life, known_epoch, slot = string.match(known, '^(%d+) (%d+) (%d+)$')
    known_life, known_epoch = tonumber(known_life), tonumber(known_epoch)
    if known_life > life then return -1 end
    if known_life == life and known_epoch >= epoch then return tonumber(slot) end
  end
  local slot = call('SPOP', base .. 'e')
  if not slot then
    slot = tonumber(call('GET', base .. 'n') or '0')
    if slot > MAX_SLOT then return -2 end
    call('SET', base .. 'n', slot + 1)
  end
  call('HSET', base .. 'o', args[2], string.format('%.0f %.0f %d', life, epoch, slot))
  return tonumber(slot)
end

-- args: SCAN cursor, COUNT, packed u16 slots to forget. Returns the next cursor ('0' at the end).
local function sweep(keys, args)
  local base = sub(keys[1], 1, -2)
  local prefix = base .. 's'
  local dead = {}
  for i = 1, #args[3], 2 do
    local a, b = byte(args[3], i, i + 1)
    -- another worker may have swept and freed it, and a holder taken it, since the caller looked
    if not is_live(base, a + b * 256) then dead[sub(args[3], i, i + 1)] = true end
  end
  local reply = call('SCAN', args[1], 'MATCH', prefix .. '*', 'COUNT', args[2])
  local hand = new_hand(base)
  for _, key in ipairs(reply[2]) do
    local segment = segment_of(hand, sub(key, #prefix + 1))
    if segment then
      local kept = {}
      for o = 1, #segment.plain, 5 do
        if not dead[sub(segment.plain, o, o + 1)] then kept[#kept + 1] = sub(segment.plain, o, o + 4) end
      end
      local others, o = {}, 1
      while o <= #segment.other do
        local size = 3 + byte(segment.other, o + 2) * 4
        if not dead[sub(segment.other, o, o + 1)] then others[#others + 1] = sub(segment.other, o, o + size - 1) end
        o = o + size
      end
      local plain, other = concat(kept), concat(others)
      if #plain ~= #segment.plain or #other ~= #segment.other then
        segment.plain, segment.other, segment.lost = plain, other, true
        set_changed(hand, segment)
      end
    end
  end
  put_hand(hand)
  return reply[1]
end

-- args: slots that no segment names any more. On shard 0, where `args[1]` is '1', they become free again.
local function swept(keys, args)
  local base = sub(keys[1], 1, -2)
  local freed = 0
  for i = 2, #args do
    if call('SREM', base .. 'd', args[i]) == 1 then
      freed = freed + 1
      if args[1] == '1' then call('SADD', base .. 'e', args[i]) end
    end
  end
  return freed
end

-- args: SCAN cursor, COUNT, slot. Returns the next cursor and (8-byte hash | u16 residency) of the slot's blocks.
local function dump(keys, args)
  local base = sub(keys[1], 1, -2)
  local prefix = base .. 's'
  local id = u16(tonumber(args[3]))
  local out = {}
  local hand = new_hand(base) -- only read, and dropped
  local reply = call('SCAN', args[1], 'MATCH', prefix .. '*', 'COUNT', args[2])
  for _, key in ipairs(reply[2]) do
    local segment = segment_of(hand, sub(key, #prefix + 1))
    local runs = segment and take_holder(segment, id) or {}
    local hashes = #runs > 0 and call('GET', base .. 'h' .. segment.first)
    for k = 1, #runs, 3 do
      local res = u16(runs[k + 2])
      for i = runs[k], runs[k + 1] - 1 do out[#out + 1] = sub(hashes, i * 8 + 1, i * 8 + 8) .. res end
    end
  end
  return {reply[1], concat(out)}
end

local function register(name, body, flags)
  redis.register_function{function_name = 'kvatlas_' .. name, flags = flags, callback = function(keys, args)
    if not sub then init() end
    return body(keys, args)
  end}
end
register('find', find_segments, {'no-writes'})
register('dump', dump, {'no-writes'})
register('apply', apply, {})
register('beat', beat, {})
register('begin', begin, {})
register('take_slot', take_slot, {})
register('sweep', sweep, {})
register('swept', swept, {})
