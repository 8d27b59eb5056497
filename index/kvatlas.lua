#!lua name=kvatlas
-- The index in Redis: path-compressed segments of at most one band (128 blocks) of one chain; index/README.md has
-- the key and value tables. Every key of a shard starts with the shard's hash tag; KEYS[1] is its incarnation key,
-- and the others are derived from it, so a shard lives on one node of a cluster.
--
-- Segment, key "…s" + 8-byte hash of its first block:
--   u8 blocks | u16 plain holders | u16 bytes of other holders | 8-byte hash of the last block
--   plain holder: u16 slot | u8 length | u16 residency              has [0, length)
--   other holder: u16 slot | u8 runs | runs x (u8 start | u8 length | u16 residency)
--   blocks x 8-byte hash
-- A branch does not split a segment: it starts its own, named by its first block. A walk that leaves a segment goes on
-- with the segment named by the next block.

local BAND = 128
local HEADER = 13
local TAKE = 61 -- first read of a segment: the header and nine plain holders
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

---------------------------------------------------------------- which slots count

local live_of = {} -- base -> {text, table}: a copy of what the text says, checked by comparing the text

local function live_slots(base)
  local text = call('GET', base .. 'l') or ''
  local known = live_of[base]
  if known and known[1] == text then return known[2] end
  local slots = {}
  for position = 1, #text do
    local bits = byte(text, position)
    for bit = 0, 7 do
      if bits % 2 == 1 then slots[(position - 1) * 8 + bit] = true end
      bits = (bits - bits % 2) / 2
    end
  end
  live_of[base] = {text, slots}
  return slots
end

local function set_live(base, slot, on)
  -- SETBIT counts from the most significant bit; ours count from the least
  call('SETBIT', base .. 'l', slot - slot % 8 + 7 - slot % 8, on)
end

local function stale()
  return redis.error_reply('KVSTALE the store has no data of this incarnation')
end

---------------------------------------------------------------- reading

-- args: how many blocks in a row that nobody holds do not end the walk, then pairs (depth of the first block, packed
-- hashes).
-- Returns u32 table version, then for every live slot and run of equal residency, in order for each slot:
--   u16 slot | u16 residency | u32 first block | u32 blocks
local function find_runs(keys, args)
  local base = sub(keys[1], 1, -2)
  if call('EXISTS', keys[1]) == 0 then return stale() end
  local live = live_slots(base)
  local prefix = base .. 's'
  local gap = tonumber(args[1])
  local out, count = {}, 0
  for part = 2, #args, 2 do
    local depth, blob = tonumber(args[part]), args[part + 1]
    local n = #blob / 8
    local pos, held_to = 0, 0 -- blocks walked; end of the last block that anybody holds
    local cur, res_of = {}, {} -- slot -> where its open run began, and with what residency
    local last_holders, last_n = nil, 0 -- of the previous segment, where everybody held all of it
    while pos < n do
      local key = prefix .. sub(blob, pos * 8 + 1, pos * 8 + 8)
      local v = call('GETRANGE', key, 0, TAKE - 1)
      if v == '' then
        for slot, from in pairs(cur) do
          count = count + 1
          out[count] = pack('<HHII', slot, res_of[slot], depth + from, pos - from)
        end
        cur, last_holders = {}, nil
        pos = pos + 1
        if pos - held_to > gap then break end
      else
        local sn, r1, r2, x1, x2 = byte(v, 1, 5)
        local plain = (r1 + r2 * 256) * 5
        local start_hashes = HEADER + plain + x1 + x2 * 256
        if start_hashes > #v then v = call('GETRANGE', key, 0, start_hashes - 1) end
        local m
        if pos + sn <= n and sub(v, 6, 13) == sub(blob, (pos + sn) * 8 - 7, (pos + sn) * 8) then
          m = sn -- the last block's chained hash vouches for all before it
        else
          local hashes = call('GETRANGE', key, start_hashes, -1)
          local lo, hi = 1, sn
          if pos + hi > n then hi = n - pos end
          while lo < hi do
            local mid = (lo + hi + 1 - (lo + hi + 1) % 2) / 2
            if sub(hashes, mid * 8 - 7, mid * 8) == sub(blob, (pos + mid) * 8 - 7, (pos + mid) * 8) then
              lo = mid
            else
              hi = mid - 1
            end
          end
          m = lo
        end
        local holders = sub(v, HEADER + 1, start_hashes)
        if holders ~= last_holders or sn ~= last_n or m ~= sn then
          local next_cur, all = {}, true
          for o = 1, plain, 5 do
            local a, b, len, c, d = byte(holders, o, o + 4)
            local slot = a + b * 256
            if live[slot] then
              local res = c + d * 256
              local from = cur[slot]
              if from then
                cur[slot] = nil
                if res_of[slot] ~= res then
                  count = count + 1
                  out[count] = pack('<HHII', slot, res_of[slot], depth + from, pos - from)
                  from = pos
                end
              else
                from = pos
              end
              if len >= m then
                next_cur[slot], res_of[slot], held_to = from, res, pos + m
                if len ~= sn then all = false end
              else
                all = false
                if pos + len > held_to then held_to = pos + len end
                count = count + 1
                out[count] = pack('<HHII', slot, res, depth + from, pos + len - from)
              end
            end
          end
          if #holders > plain then
            all = false
            local o = plain + 1
            while o <= #holders do
              local a, b, runs = byte(holders, o, o + 2)
              o = o + 3
              local slot = a + b * 256
              local from, res = cur[slot], res_of[slot]
              cur[slot] = nil
              for _ = 1, runs do
                local start, len, c, d = byte(holders, o, o + 3)
                o = o + 4
                if live[slot] and start < m then
                  local run_res = c + d * 256
                  if from and (start > 0 or run_res ~= res) then
                    count = count + 1
                    out[count] = pack('<HHII', slot, res, depth + from, pos - from)
                    from = nil
                  end
                  if not from then from = pos + start end
                  if start + len >= m then
                    next_cur[slot], res_of[slot], held_to = from, run_res, pos + m
                  else
                    if pos + start + len > held_to then held_to = pos + start + len end
                    count = count + 1
                    out[count] = pack('<HHII', slot, run_res, depth + from, pos + start + len - from)
                  end
                  from = nil
                end
              end
              if from then
                count = count + 1
                out[count] = pack('<HHII', slot, res, depth + from, pos - from)
              end
            end
          end
          for slot, from in pairs(cur) do
            count = count + 1
            out[count] = pack('<HHII', slot, res_of[slot], depth + from, pos - from)
          end
          cur = next_cur
          if all and m == sn then last_holders, last_n = holders, sn else last_holders = nil end
          if pos + m - held_to > gap then break end
        else
          held_to = pos + m
        end
        pos = pos + m
      end
    end
    for slot, from in pairs(cur) do
      count = count + 1
      out[count] = pack('<HHII', slot, res_of[slot], depth + from, pos - from)
    end
  end
  return pack('<I', tonumber(call('GET', base .. 'v') or '0')) .. concat(out)
end

---------------------------------------------------------------- one segment in hand, written back when left

local function load_segment(prefix, first)
  local v = call('GET', prefix .. first)
  if not v then return nil end
  local r1, r2, x1, x2 = byte(v, 2, 5)
  local plain_end = HEADER + (r1 + r2 * 256) * 5
  local other_end = plain_end + x1 + x2 * 256
  return {
    first = first,
    plain = sub(v, HEADER + 1, plain_end),
    other = sub(v, plain_end + 1, other_end),
    hashes = sub(v, other_end + 1),
    dirty = false,
    lost = false, -- somebody lost blocks at its end
  }
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

local function save_segment(prefix, segment)
  if not segment or not segment.dirty then return end
  if segment.lost then
    local keep = held(segment)
    if keep == 0 then
      call('DEL', prefix .. segment.first)
      return
    end
    segment.hashes = sub(segment.hashes, 1, keep * 8)
  end
  local hashes = segment.hashes
  call(
    'SET',
    prefix .. segment.first,
    char(#hashes / 8) .. u16(#segment.plain / 5) .. u16(#segment.other) .. sub(hashes, -8)
      .. segment.plain .. segment.other .. hashes
  )
end

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

-- the slow way: a holder whose blocks in this segment are not one run from the start
local function mark_blocks(segment, id, a, b, res)
  local have = {}
  local at = find_plain(segment.plain, id)
  if at then
    local len, c, d = byte(segment.plain, at + 2, at + 4)
    for i = 0, len - 1 do have[i] = c + d * 256 end
    segment.plain = sub(segment.plain, 1, at - 1) .. sub(segment.plain, at + 5)
  else
    local o, size = find_other(segment.other, id)
    if o then
      for k = o + 3, o + size - 4, 4 do
        local start, len, c, d = byte(segment.other, k, k + 3)
        for i = start, start + len - 1 do have[i] = c + d * 256 end
      end
      segment.other = sub(segment.other, 1, o - 1) .. sub(segment.other, o + size)
    end
  end
  for i = a, b - 1 do have[i] = res end
  local runs, i = {}, 0
  while i < BAND do
    local value = have[i] or 0
    local start = i
    repeat i = i + 1 until i >= BAND or (have[i] or 0) ~= value
    if value ~= 0 then runs[#runs + 1] = char(start, i - start) .. u16(value) end
  end
  if #runs == 0 then return end
  if #runs == 1 and byte(runs[1], 1) == 0 then
    segment.plain = segment.plain .. id .. sub(runs[1], 2, 4)
  else
    segment.other = segment.other .. id .. char(#runs) .. concat(runs)
  end
end

-- holder `id` now has the segment's blocks [a, b) with residency res; 0: not any more
local function mark(segment, id, a, b, res)
  local plain = segment.plain
  local at = find_plain(plain, id)
  if at then
    local len, c, d = byte(plain, at + 2, at + 4)
    local had = c + d * 256
    if res == had and a <= len then
      if b <= len then return end
      segment.plain = sub(plain, 1, at + 1) .. char(b) .. sub(plain, at + 3)
    elseif res == 0 and a >= len then
      return
    elseif res == 0 and b >= len then
      segment.lost = true
      if a == 0 then
        segment.plain = sub(plain, 1, at - 1) .. sub(plain, at + 5)
      else
        segment.plain = sub(plain, 1, at + 1) .. char(a) .. sub(plain, at + 3)
      end
    elseif res ~= 0 and a == 0 and b >= len then
      segment.plain = sub(plain, 1, at + 1) .. char(b) .. u16(res) .. sub(plain, at + 5)
    else
      mark_blocks(segment, id, a, b, res)
    end
  else
    local known = #segment.other > 0 and find_other(segment.other, id)
    if not known then
      if res == 0 then return end
      if a == 0 then
        segment.plain = plain .. id .. char(b) .. u16(res)
      else
        mark_blocks(segment, id, a, b, res)
      end
    else
      if res == 0 then segment.lost = true end
      mark_blocks(segment, id, a, b, res)
    end
  end
  segment.dirty = true
end

-- position (in blocks) of the first hash of chain[from, to) that names a segment, or nil
local function next_segment(prefix, chain, from, to)
  if from >= to then return nil end
  local names = {}
  for i = from, to - 1 do names[#names + 1] = prefix .. sub(chain, i * 8 + 1, i * 8 + 8) end
  if call('EXISTS', unpack_list(names)) == 0 then return nil end
  for i, name in ipairs(names) do
    if call('EXISTS', name) == 1 then return from + i - 1 end
  end
end

-- A holder's blocks [first, end) of a chain that starts at its band's first block now have residency res.
-- `segment` is the one in hand; returns the one in hand afterwards.
local function write_run(prefix, segment, id, first, chain, res)
  local total = #chain / 8
  local pos = 0
  while pos < total do
    local name = sub(chain, pos * 8 + 1, pos * 8 + 8)
    if not segment or segment.first ~= name then
      save_segment(prefix, segment)
      segment = load_segment(prefix, name)
    end
    local fresh = not segment
    if fresh and res == 0 then
      pos = next_segment(prefix, chain, pos + 1, total) or total
    else
      if fresh then segment = {first = name, plain = '', other = '', hashes = '', dirty = false, lost = false} end
      local hashes = segment.hashes
      local n = #hashes / 8
      local lo, hi = fresh and 0 or 1, n
      if pos + hi > total then hi = total - pos end
      if hi > 0 and sub(hashes, hi * 8 - 7, hi * 8) == sub(chain, (pos + hi) * 8 - 7, (pos + hi) * 8) then
        lo = hi
      else
        while lo < hi do
          local mid = (lo + hi + 1 - (lo + hi + 1) % 2) / 2
          if sub(hashes, mid * 8 - 7, mid * 8) == sub(chain, (pos + mid) * 8 - 7, (pos + mid) * 8) then
            lo = mid
          else
            hi = mid - 1
          end
        end
      end
      if lo == n and pos + lo < total and res ~= 0 then
        -- append what is new, up to the next block that already names a segment
        local stop = next_segment(prefix, chain, pos + lo + (fresh and 1 or 0), total) or total
        if stop > pos + lo then
          segment.hashes = hashes .. sub(chain, (pos + lo) * 8 + 1, stop * 8)
          segment.dirty = true
          lo = stop - pos
        end
      end
      local a = first - pos
      if a < lo then mark(segment, id, a > 0 and a or 0, lo, res) end
      pos = pos + lo
    end
  end
  return segment
end

---------------------------------------------------------------- applying a flush

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

-- args: incarnation, cursor field ('' for none), cursor offset, packed writes. Each write:
--   u16 bytes of the holder's name | u64 life | u64 epoch | u16 slot | u64 first sequence | u64 last sequence
--   | u8 sources | u32 runs | u32 bytes of the profile | name | profile
--   | sources x (u8 bytes | source | u64 engine sequence) | runs x (u8 first block | u16 residency | u16 bytes of the chain | chain)
-- Returns applied writes, repeats, refused lives, holders found with a gap.
local function apply(keys, args)
  local base = sub(keys[1], 1, -2)
  if call('GET', keys[1]) ~= args[1] then return stale() end
  local prefix = base .. 's'
  local blob, at = args[4], 1
  local applied, repeated, refused, gaps = 0, 0, 0, 0
  local moved = false
  local segment
  while at <= #blob do
    local name_size, life, epoch, slot, first_seq, last_seq, sources, runs, profile_size
    name_size, life, epoch, slot, first_seq, last_seq, sources, runs, profile_size, at =
      unpack('<HI8I8HI8I8BII', blob, at)
    local holder = sub(blob, at, at + name_size - 1)
    at = at + name_size
    local profile = sub(blob, at, at + profile_size - 1)
    at = at + profile_size
    local told = {}
    for _ = 1, sources do
      local size = byte(blob, at)
      local source = sub(blob, at + 1, at + size)
      local sequence
      sequence, at = unpack('<I8', blob, at + size + 1)
      told[#told + 1] = holder .. '\0' .. source
      told[#told + 1] = string.format('%.0f %.0f', life, sequence)
    end
    local fence = read_fence(base, holder)
    local take = true
    if fence and (life < fence.life or (life == fence.life and epoch < fence.epoch)) then
      take = false
      if life < fence.life then refused = refused + 1 else repeated = repeated + 1 end
    elseif fence and life == fence.life and epoch == fence.epoch and last_seq <= fence.sequence then
      take = false
      repeated = repeated + 1
    end
    if take then
      if not fence or life > fence.life or epoch > fence.epoch then
        if fence then
          set_live(base, fence.slot, 0)
          call('SADD', base .. 'd', fence.slot)
          if life > fence.life then call('HDEL', base .. 'b', holder) end
        end
        set_live(base, slot, 1)
        moved = true
        -- a life must be seen from its first record on, or from a clear
        local whole = first_seq == 1 or epoch == first_seq
        fence = {life = life, epoch = epoch, slot = slot, sequence = 0, broken = whole and 0 or 1}
        if not whole then gaps = gaps + 1 end
      elseif first_seq > fence.sequence + 1 and fence.broken == 0 then
        fence.broken = 1
        gaps = gaps + 1
      end
      slot = fence.slot
      applied = applied + 1
    end
    local id = u16(slot)
    for _ = 1, runs do
      local first, res, size
      first, res, size, at = unpack('<BHH', blob, at)
      if take then
        segment = write_run(prefix, segment, id, first, sub(blob, at, at + size - 1), res)
      end
      at = at + size
    end
    if take then
      fence.sequence = last_seq
      write_fence(base, holder, fence)
      if #told > 0 then call('HSET', base .. 'a', unpack_list(told)) end
      if profile_size > 0 then
        call('HSET', base .. 'p', holder, profile)
        moved = true
      end
    end
  end
  save_segment(prefix, segment)
  if args[2] ~= '' then
    local known = tonumber(call('HGET', base .. 'c', args[2]) or '-1')
    if tonumber(args[3]) > known then call('HSET', base .. 'c', args[2], args[3]) end
  end
  if moved then call('INCR', base .. 'v') end
  return {applied, repeated, refused, gaps}
end

-- args: incarnation, then triples (holder, life and last sequence as "life sequence", packed heartbeat).
-- The heartbeat is kept with Redis' own time; one that knows of records that never came marks a gap.
local function beat(keys, args)
  local base = sub(keys[1], 1, -2)
  if call('GET', keys[1]) ~= args[1] then return stale() end
  local now = call('TIME')
  local stamp = string.format('%.0f', now[1] * 1000 + (now[2] - now[2] % 1000) / 1000)
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
  local dead, live = {}, live_slots(base)
  for i = 1, #args[3], 2 do
    local a, b = byte(args[3], i, i + 1)
    -- another worker may have swept and freed it, and a holder taken it, since the caller looked
    if not live[a + b * 256] then dead[sub(args[3], i, i + 1)] = true end
  end
  local reply = call('SCAN', args[1], 'MATCH', prefix .. '*', 'COUNT', args[2])
  for _, key in ipairs(reply[2]) do
    local segment = load_segment(prefix, sub(key, #prefix + 1))
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
        segment.plain, segment.other, segment.dirty, segment.lost = plain, other, true, true
        save_segment(prefix, segment)
      end
    end
  end
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
  local prefix = sub(keys[1], 1, -2) .. 's'
  local id = u16(tonumber(args[3]))
  local out = {}
  local reply = call('SCAN', args[1], 'MATCH', prefix .. '*', 'COUNT', args[2])
  for _, key in ipairs(reply[2]) do
    local segment = load_segment(prefix, sub(key, #prefix + 1))
    local function blocks(start, len, res)
      for i = start, start + len - 1 do out[#out + 1] = sub(segment.hashes, i * 8 + 1, i * 8 + 8) .. res end
    end
    local at = segment and find_plain(segment.plain, id)
    if at then blocks(0, byte(segment.plain, at + 2), sub(segment.plain, at + 3, at + 4)) end
    local o, size
    if segment then o, size = find_other(segment.other, id) end
    if o then
      for k = o + 3, o + size - 4, 4 do
        local start, len = byte(segment.other, k, k + 1)
        blocks(start, len, sub(segment.other, k + 2, k + 3))
      end
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
register('find', find_runs, {'no-writes'})
register('dump', dump, {'no-writes'})
register('apply', apply, {})
register('beat', beat, {})
register('take_slot', take_slot, {})
register('sweep', sweep, {})
register('swept', swept, {})
